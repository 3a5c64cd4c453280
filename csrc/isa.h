// The instruction set that a file is compiled for. Kernels live in `namespace smyrf::SMYRF_ISA`; avx2.cpp and
// avx512.cpp define these three before they include them. The defaults are the baseline's, and an editor's.
//
// One rule keeps the instruction sets apart whatever the linker does: whatever is compiled for one and is not inlined
// has SMYRF_ISA in its name. So templates of the standard library are instantiated with a type of that namespace, or
// inlined; .ci/sanitize looks at the symbols. Code that all share is compiled without flags of an instruction set.
#pragma once

#ifndef SMYRF_ISA
#define SMYRF_ISA baseline
#define SMYRF_BYTES 16  // of a vector
#ifdef __aarch64__
#define SMYRF_REGISTERS 32  // of vectors
#else
#define SMYRF_REGISTERS 16
#endif
#endif
