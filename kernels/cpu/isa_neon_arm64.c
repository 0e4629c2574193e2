#define ISA "neon"
#define TABLE gdnk_neon
#define VW 4
#define RB 8 
#include "table.h"
