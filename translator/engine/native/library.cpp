// What this object is, and which of them the machine can run.
#include <cstring>

#include "internal.h"

// Set by the build, together with the compiler's options for it.
#ifndef TRANSLATOR_ISA
#define TRANSLATOR_ISA "generic"
#endif

const char* tr_isa(void) { return TRANSLATOR_ISA; }

int32_t tr_supports(const char* isa) {
    auto is = [isa](const char* name) { return std::strcmp(isa, name) == 0; };
    if (is("generic")) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (is("avx2")) return avx2;
    if (is("avx512")) return avx512;
    if (is("avx512vnni")) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
    return 0;
}

int32_t tr_version(void) { return 1; }
