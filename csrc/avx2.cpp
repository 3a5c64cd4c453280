#define SMYRF_ISA avx2
#define SMYRF_BYTES 32
#define SMYRF_REGISTERS 16
#include "kernel_table.h"
