#pragma GCC target("arch=x86-64-v3")
#define ISA "avx2"
#define TABLE gdnk_avx2
#define VW 8
#define RB 6 // 16 registers: 12 accumulators
#include "table.h"
