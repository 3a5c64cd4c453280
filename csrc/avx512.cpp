#define SMYRF_ISA avx512
#define SMYRF_BYTES 64
#define SMYRF_REGISTERS 32
#include "kernel_table.h"
