#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define ISA "avx512"
#define TABLE gdnk_avx512
#define VW 16
#define RB 8 
#include "table.h"
