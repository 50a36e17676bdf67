// The kernels' C interface: what Python prepares once and calls many times. No model structure is known here.
//
// Letters as in the project's docs: M rows, K inputs and N outputs of a product, H query heads, H_kv key heads, D_head
// head width, T new tokens a row, S keys, V vocabulary. All activations are fp32, rows are contiguous, `ld…` is the
// distance in elements from one row to the next. Pointers need no alignment; weights made by tr_pack lie on 64 bytes.
//
// Every number of an output row is summed in one fixed order that depends neither on the other rows, their count, the
// thread count nor padding that is hidden: results are bit-identical for one row alone and among others.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)  // these, and nothing else, are exported
extern "C" {

enum TrType : int32_t { TR_FLOAT32 = 0, TR_FLOAT16 = 1, TR_BFLOAT16 = 2, TR_INT8 = 3 };
enum TrActivation : int32_t { TR_NONE = 0, TR_RELU = 1, TR_GELU = 2 };  // GELU is the exact one, with erf

// -- what a program is made of ----------------------------------------------------------------------------------------

// y = residual + activation(norm(x) Wᵀ + b); gamma == null: no norm; beta, residual may be null. y may be residual.
struct TrProduct {
    const void* weights;  // a block of tr_pack, bias included
    const float* x;
    const float* gamma;
    const float* beta;
    const float* residual;
    float* y;
    int64_t ldx, ldr, ldy;
    int32_t type, activation;  // TrType, TrActivation
    int32_t N, K;
    int32_t T;  // M = rows * T
    float eps;
};

// y = norm(x), M = rows * T; y may be x.
struct TrNorm {
    const float* x;
    const float* gamma;  // null: no norm's weight (1)
    const float* beta;   // null: 0
    float* y;
    int64_t ldx, ldy;
    int32_t width, T;
    float eps;
};

// Self-attention with a cache: writes the T new keys and values of each row into its slots lengths[row] …, then lets
// query t of a row see slots 0 … lengths[row] + t. Without `origin`, row r's slots lie in buffer row r; with it, slot s
// of row r lies in buffer row origin[r * ld_origin + s] (a beam's ancestry); new ones are written to home[r], and origin
// says so afterwards.
struct TrCached {
    const float* q;  // (rows, T, H, D_head), row stride ldq a token
    const float* k;  // (rows, T, H_kv, D_head)
    const float* v;
    float* keys;  // (buffer rows, H_kv, slots, D_head)
    float* values;
    const int32_t* lengths;  // (rows,)
    int32_t* origin;         // (rows, ld_origin) or null
    const int32_t* home;     // (rows,) or null
    float* y;                // (rows, T, H, D_head)
    int64_t ldq, ldk, ldv, ldy, ld_origin;
    int64_t slots;
    int32_t H, H_kv, D_head, T;
    float scale;  // 1 / sqrt(D_head)
};

// Attention over given keys and values: a source (beams > 1: rows r … of sentence r / beams), an encoder's layer, or a
// whole causal pass. `visible` hides keys with 0. A query that sees no key gives zeros.
struct TrDense {
    const float* q;  // (rows, T, H, D_head)
    const float* k;  // [sentence * k_sentence + head * k_head + s * k_key + d]
    const float* v;
    const uint8_t* visible;  // (sentences, S) or null
    float* y;                // (rows, T, H, D_head)
    int64_t ldq, ldy;
    int64_t k_sentence, k_head, k_key;
    int64_t v_sentence, v_head, v_key;
    int32_t H, H_kv, D_head, T, S, beams;
    int32_t causal;  // query t sees keys 0 … S - T + t
    float scale;
};

// y = table[id] * scale + positions[lengths[row]]: each row's next token at its place. Ids are the caller's promise.
struct TrEmbed {
    const int64_t* ids;      // (rows,)
    const void* table;       // (V, width) of `type`, a float type
    const float* positions;  // (any, width)
    const int32_t* lengths;  // (rows,)
    float* y;                // (rows, width)
    int32_t type, width;
    float scale;
};

// Each row has one token more: the end of a step.
struct TrAdvance {
    int32_t* lengths;  // (rows,)
};

enum TrKind : int32_t { TR_PRODUCT = 0, TR_NORM = 1, TR_CACHED = 2, TR_DENSE = 3, TR_EMBED = 4, TR_ADVANCE = 5 };
struct TrCall {
    const void* what;  // a TrProduct, TrNorm, TrCached, TrDense, TrEmbed or TrAdvance
    int64_t kind;      // TrKind
};

// Runs the calls in order on `rows` rows with `threads` threads (the caller's is one of them): a step, in one call.
// Several callers may be inside at once, each with threads of its own.
void tr_run(const TrCall* calls, int64_t count, int64_t rows, int32_t threads);

// -- weights ----------------------------------------------------------------------------------------------------------

// Bytes of the packed form of a weight (N, K) and its bias.
int64_t tr_packed_bytes(int32_t type, int64_t N, int64_t K);
// Packs a row-major weight (N, K) of `source` type (float32, float16 or bfloat16) and fp32 bias (N) or null into `to`
// (64-byte aligned). The form is the same for every instruction set. int8: one scale an output, round to nearest even,
// -127 … 127. Returns 0, or -1 where a weight is not finite (or, for float16, too large).
int32_t tr_pack(int32_t type, int64_t N, int64_t K, const void* weight, int32_t source, const float* bias, void* to);

// -- scores -----------------------------------------------------------------------------------------------------------

// log_z[m] = log of the sum of exp of row m of logits (M, V), in fp64. A row with a NaN or +inf gives NaN or inf.
void tr_log_z(const float* logits, int64_t M, int64_t V, int64_t ld, double* log_z, int32_t threads);
// The k largest of each row less its log_z, which is given too: log-probabilities, descending, the lower id first among equals; ids in banned (M, n_banned; -1 is none) are
// passed over. With fewer than k left the rest is -inf with ids that are in range and were not chosen. NaN is never
// chosen before a number.
void tr_top(const float* logits, int64_t M, int64_t V, int64_t ld, int32_t k, const int64_t* banned, int32_t n_banned,
            double* values, int64_t* ids, double* log_z, int32_t threads);

// -- training ---------------------------------------------------------------------------------------------------------
// Activations are of `type`, float32 or bfloat16; parameters, their gradients and what has no type are fp32.

// Attention over packed sentences (no padding): rows q_starts[s] … of q see rows k_starts[s] … of k and v. Forward
// writes y; backward reads y as its gradient and writes dq, dk, dv.
struct TrPackedAttention {
    const void* q;  // (N, H, D_head), `ld…` elements a token
    const void* k;
    const void* v;
    void* y;
    void* dq;
    void* dk;
    void* dv;
    const int32_t* q_starts;  // (sentences + 1,)
    const int32_t* k_starts;
    int64_t ldq, ldk, ldv, ldy, ld_dq, ld_dk, ld_dv;
    int64_t sentences;
    int32_t type, H, D_head;
    int32_t causal;  // query i of a sentence sees its keys 0 … i
    float scale;
};
void tr_packed_attention(const TrPackedAttention* attention, int32_t back, int32_t threads);

// y = LayerNorm(x), and what the backward pass needs: each row's mean and 1 / standard deviation.
void tr_train_norm(const float* x, const float* gamma, const float* beta, float eps, int64_t rows, int64_t width,
                   int32_t type, void* y, float* mean, float* inverse, int32_t threads);
void tr_train_norm_back(const void* dy, int32_t type, const float* x, const float* gamma, const float* mean,
                        const float* inverse, int64_t rows, int64_t width, float* dx, float* dgamma, float* dbeta,
                        int32_t threads);

// out = residual + dropout(y), each of `total` elements dropped with probability threshold / 256.
void tr_train_residual(const void* y, int32_t type, const float* residual, int64_t total, uint32_t seed,
                       int32_t threshold, float* out, int32_t threads);
void tr_train_residual_back(const float* grad, int64_t total, uint32_t seed, int32_t threshold, void* dy, int32_t type,
                            int32_t threads);

// y = dropout(relu(y)) in place; backward: grad = its gradient, by the y that came out.
void tr_train_relu(void* y, int32_t type, int64_t total, uint32_t seed, int32_t threshold, int32_t threads);
void tr_train_relu_back(const void* y, void* grad, int32_t type, int64_t total, int32_t threshold, int32_t threads);

// Label-smoothed cross entropy of each row of logits (rows, V), whose place its gradient times `scale` takes.
void tr_train_loss(void* logits, int32_t type, int64_t rows, int64_t V, const int64_t* target, float smoothing,
                   float scale, double* losses, int32_t threads);

// -- the library ------------------------------------------------------------------------------------------------------

// What this object was compiled for: "avx512", "avx2", "generic", …
const char* tr_isa(void);
// 1 where the CPU (and the system) can run the instruction set of that name.
int32_t tr_supports(const char* isa);
// The version of this interface; Python refuses another.
int32_t tr_version(void);
}
#pragma GCC visibility pop
