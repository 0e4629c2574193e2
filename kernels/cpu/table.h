// What an instruction set's file includes after choosing its target, VW and RB: the kernels and their table.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "cpu.h"
#include "vec.h"
#include "rows.h"
#include "scan.h"
#include "gdn.h"
#include "gate.h"
#include "conv.h"
#include "stage.h"
#include "summary.h"
#include "frame.h"
#include "paged.h"

#define ENTRY(name) [OP_##name] = op_##name,
const gdnk_table TABLE = {ISA, {GDNK_OPS(ENTRY)}};
