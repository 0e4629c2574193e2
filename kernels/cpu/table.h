// What an instruction set's file includes after choosing its target, VW and RB: the kernels and their table.
#include <stdlib.h>

#include "cpu.h"
#include "vec.h"
#include "rows.h"
#include "scan.h"
#include "gdn.h"

const gdnk_table TABLE = {
	ISA,
	{
		[OP_fwd] = op_fwd,
		[OP_bwd] = op_bwd,
		[OP_recurrent_fwd] = op_recurrent_fwd,
		[OP_recurrent_bwd] = op_recurrent_bwd,
	},
};
