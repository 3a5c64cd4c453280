#define SMYRF_ISA baseline
#define SMYRF_BYTES 16
#ifdef __aarch64__
#define SMYRF_REGISTERS 32
#else
#define SMYRF_REGISTERS 16
#endif
#include "isa.h"
