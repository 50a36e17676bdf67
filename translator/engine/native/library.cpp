// What this object is, and which of them the machine can run.
#include <cstring>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "internal.h"

// Set by the build, together with the compiler's options for it.
#ifndef TRANSLATOR_ISA
#define TRANSLATOR_ISA "generic"
#endif

// The matrix unit's registers are large, so Linux has a process ask for them first; asking again does no harm.
static bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr int ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, ask, tile_data) == 0;
#else
    return false;
#endif
}

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
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (is("avx512vnni")) return vnni;
    if (is("amx")) return vnni && __builtin_cpu_supports("amx-int8") && may_use_tiles();
#endif
    return 0;
}

int32_t tr_version(void) { return 3; }
