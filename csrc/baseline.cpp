// The instruction set that every machine of the architecture has: the defaults of isa.h.
#include "kernel_table.h"
