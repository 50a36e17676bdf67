// int8 products in bulk on a matrix unit (AMX): 16 rows of 64 inputs times 64 inputs of 16 outputs in one instruction.
#pragma once
#if defined(__AMX_INT8__)
#include <immintrin.h>

#include "panels.h"

constexpr int kTile = 16;  // rows of a tile
constexpr bool kTiles = true;

// The unit is this thread's as long as one of these lives; all tiles are 16 rows of 64 bytes.
struct TileUnit {
    explicit TileUnit(bool wanted) : wanted(wanted) {
        if (!wanted) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        _tile_loadconfig(&shape);
    }
    ~TileUnit() {
        if (wanted) _tile_release();
    }
    TileUnit(const TileUnit&) = delete;
    const bool wanted;
};

// Sums as multiply_int8 gives them, for 16 (two: 32) rows of codes; what stands behind the last row is read, too.
template <bool two>
__attribute__((noinline)) void multiply_tiles(const char* x, int64_t ldx, const char* weights, int64_t K,
                                              int32_t* sums) {
    asm volatile("" ::: "memory");  // the instructions below don't tell the compiler what they read
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < K; k += 64, weights += 64 * kPanel) {
        _tile_loadd(6, weights, 4 * kPanel);
        _tile_loadd(7, weights + 4 * kTile, 4 * kPanel);
        _tile_loadd(4, x + k, ldx);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + kTile * ldx + k, ldx);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 4 * kPanel);
    _tile_stored(1, sums + kTile, 4 * kPanel);
    if (two) {
        _tile_stored(2, sums + kTile * kPanel, 4 * kPanel);
        _tile_stored(3, sums + kTile * kPanel + kTile, 4 * kPanel);
    }
}

#else  // none: what the other kernels do

constexpr int kTile = 1;
constexpr bool kTiles = false;
struct TileUnit {
    explicit TileUnit(bool) {}
};
template <bool two>
void multiply_tiles(const char*, int64_t, const char*, int64_t, int32_t*) {}
#endif
