#pragma GCC target("arch=x86-64-v2")
#define ISA "x86-64-v2"
#define TABLE gdnk_base
#define VW 4
#define RB 6 
#include "table.h"
