#define SMYRF_ISA baseline
#define SMYRF_BYTES 16
#define SMYRF_REGISTERS 16
#include "isa.h"
