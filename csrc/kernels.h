// `attend` and its gradient for one instruction set. Included once per instruction set, inside its namespace.
//
// A group is cut into blocks of I queries and J keys. Scores stand transposed, keys × queries: then a row of keys is
// read where it lies, one number at a time, against queries that are packed side by side; maximum, exponential and sum
// run over whole vectors without a horizontal step; and the weights of a key are side by side for the second product, whose
// vectors are rows of values. Packing pads all vectors with zeros, so that no product has a tail.

#include "simd.h"

constexpr int TILE_ROWS = 6;                                  // keys (or queries) of a tile of a product …
constexpr int TILE_VECTORS = SMYRF_REGISTERS >= 32 ? 4 : 2;   // … and its vectors: all stay in registers
constexpr int I = 64;                                         // queries in a block
constexpr int J = 256;                                        // keys in a block

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows of the next group, fetched little by little while this one is computed: those at `index` in several tables.
class Prefetch {
   public:
    void clear() { n_tables_ = table_ = 0, at_ = 0, n_rows_ = 0; }
    void add(const void* table, int64_t stride, int64_t bytes, const int64_t* index, int64_t n) {
        tables_[n_tables_++] = {static_cast<const char*>(table), stride, bytes, index, n};
        n_rows_ += n;
    }
    void step(int64_t rows) {
        while (rows > 0 && table_ < n_tables_) {
            const Table& from = tables_[table_];
            const int64_t last = std::min(from.n, at_ + rows);
            rows -= last - at_;
            for (; at_ < last; ++at_) {
                const char* row = from.data + from.index[at_] * from.stride;  // of an empty slot: fetched in vain
                for (int64_t line = 0; line < from.bytes; line += 64) __builtin_prefetch(row + line, 0, 2);
            }
            if (at_ == from.n) ++table_, at_ = 0;
        }
    }
    // How many rows a step has to take to be done in so many steps.
    int64_t pace(int64_t steps) const { return (n_rows_ + steps - 1) / std::max<int64_t>(steps, 1); }

   private:
    struct Table {
        const char* data;
        int64_t stride, bytes;
        const int64_t* index;
        int64_t n;
    };
    Table tables_[5];
    int n_tables_ = 0, table_ = 0;
    int64_t at_ = 0, n_rows_ = 0;
};

// c[r][v] (+)= Σ_k a[r][k · step] · b[k][v], for R rows and K vectors.
template <class T, int R, int K>
inline void tile(const T* const* a, int64_t step, const T* b, int64_t ldb, int64_t inner, T* c, int64_t ldc, bool add) {
    constexpr int W = Simd<T>::W;
    Vec<T> sum[R][K];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < K; ++v) sum[r][v] = Vec<T>{};
    const T* row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) row[r] = a[r];
    for (int64_t k = 0; k < inner; ++k, b += ldb) {
        Vec<T> x[K];
#pragma GCC unroll 8
        for (int v = 0; v < K; ++v) x[v] = load(b + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec<T> y = fill(row[r][k * step]);
#pragma GCC unroll 8
            for (int v = 0; v < K; ++v) sum[r][v] += y * x[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < K; ++v) {
            T* to = c + r * ldc + v * W;
            store(to, add ? load(to) + sum[r][v] : sum[r][v]);
        }
}

template <class T, int R>
inline void tile_of(int vectors, const T* const* a, int64_t step, const T* b, int64_t ldb, int64_t inner, T* c,
                    int64_t ldc, bool add) {
    switch (vectors) {
        case 1: return tile<T, R, 1>(a, step, b, ldb, inner, c, ldc, add);
        case 2: return tile<T, R, 2>(a, step, b, ldb, inner, c, ldc, add);
#if SMYRF_REGISTERS >= 32
        case 3: return tile<T, R, 3>(a, step, b, ldb, inner, c, ldc, add);
        default: return tile<T, R, 4>(a, step, b, ldb, inner, c, ldc, add);
#endif
    }
}

// c (rows × columns) (+)= a · b; `columns` is a multiple of a vector, rows of a are pointers.
template <class T>
void product(const T* const* a, int64_t rows, int64_t step, const T* b, int64_t ldb, int64_t columns, int64_t inner,
             T* c, int64_t ldc, bool add, Prefetch& prefetch, int64_t pace) {
    constexpr int W = Simd<T>::W;
    for (int64_t column = 0; column < columns; column += TILE_VECTORS * W) {
        const int vectors = static_cast<int>(std::min<int64_t>(TILE_VECTORS, (columns - column) / W));
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            const T* from = b + column;
            T* to = c + r * ldc + column;
            switch (std::min<int64_t>(TILE_ROWS, rows - r)) {
                case 1: tile_of<T, 1>(vectors, a + r, step, from, ldb, inner, to, ldc, add); break;
                case 2: tile_of<T, 2>(vectors, a + r, step, from, ldb, inner, to, ldc, add); break;
                case 3: tile_of<T, 3>(vectors, a + r, step, from, ldb, inner, to, ldc, add); break;
                case 4: tile_of<T, 4>(vectors, a + r, step, from, ldb, inner, to, ldc, add); break;
                case 5: tile_of<T, 5>(vectors, a + r, step, from, ldb, inner, to, ldc, add); break;
                default: tile_of<T, 6>(vectors, a + r, step, from, ldb, inner, to, ldc, add);
            }
            prefetch.step(pace);
        }
    }
}

// Rows side by side: to[d][i] = factor · rows[i][d], zero where a row is null, for I rows.
template <class T>
void pack_columns(const T* const* rows, int64_t n, int64_t width, T factor, T* to) {
    constexpr int W = Simd<T>::W;
    for (int64_t i = 0; i < n; i += W) {
        int64_t d = 0;
        for (; d + W <= width; d += W) {
            Vec<T> x[W];
            for (int r = 0; r < W; ++r) {
                const T* row = i + r < n ? rows[i + r] : nullptr;
                x[r] = row ? load(row + d) * factor : Vec<T>{};
            }
            transpose<T>(x);
            for (int r = 0; r < W; ++r) store(to + (d + r) * I + i, x[r]);
        }
        for (; d < width; ++d)
            for (int r = 0; r < W; ++r) {
                const T* row = i + r < n ? rows[i + r] : nullptr;
                to[d * I + i + r] = row ? row[d] * factor : T(0);
            }
    }
}

// Rows below each other: to[i] = factor · rows[i], filled up with zeros to `padded` numbers; null is a row of zeros.
template <class T>
void pack_rows(const T* const* rows, int64_t n, int64_t width, int64_t padded, T factor, T* to) {
    constexpr int W = Simd<T>::W;
    for (int64_t i = 0; i < n; ++i, to += padded) {
        if (rows[i] == nullptr) {
            std::memset(to, 0, padded * sizeof(T));
            continue;
        }
        int64_t d = 0;
        for (; d + W <= width; d += W) store(to + d, load(rows[i] + d) * factor);
        for (; d < width; ++d) to[d] = rows[i][d] * factor;
        for (; d < padded; ++d) to[d] = T(0);
    }
}

// Dropout by a counter, as smyrf/kernels/dropout.py has it.
inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

inline uint32_t stream_of(int64_t seed, int64_t number) {
    const uint32_t first = mix(static_cast<uint32_t>(number) ^ static_cast<uint32_t>(seed));
    return mix(first ^ static_cast<uint32_t>(seed >> 32));
}

// The keys of one group: those that are there, then its extra ones.
template <class T>
struct Keys {
    std::vector<const T*> k, v;
    std::vector<T> bias;
    std::vector<int64_t> slot, number;  // place in the list of keys; index of the key, for dropout and gradients
    int64_t n_listed = 0;

    int64_t size() const { return static_cast<int64_t>(k.size()); }
};

template <class T>
struct Row {  // one of the B rows of a call
    const Call<T>& call;
    int64_t number;  // of B
    const T *q, *k, *v;

    Row(const Call<T>& c, int64_t n) : call(c), number(n) {
        const int64_t batch = n / c.heads, head = n % c.heads, kv = head / (c.heads / c.kv_heads);
        q = c.q.data + batch * c.q.batch_stride + head * c.q.head_stride;
        k = c.k.data + batch * c.k.batch_stride + kv * c.k.head_stride;
        v = c.v.data + batch * c.v.batch_stride + kv * c.v.head_stride;
    }
    const int64_t* queries(const List<T>& list, int64_t group) const {
        return list.queries + number * list.queries_stride + group * list.slots;
    }
    const int64_t* keys(const List<T>& list, int64_t group) const {
        return list.keys + number * list.keys_stride + group * list.size;
    }
    int64_t of_group(const List<T>& list, int64_t group) const { return number * list.n_groups + group; }

    void collect(const List<T>& list, int64_t group, Keys<T>& to) const {
        to.k.clear(), to.v.clear(), to.bias.clear(), to.slot.clear(), to.number.clear();
        const int64_t* keys_of = keys(list, group);
        for (int64_t j = 0; j < list.size; ++j) {
            if (keys_of[j] < 0) continue;
            to.k.push_back(k + keys_of[j] * call.k.stride), to.v.push_back(v + keys_of[j] * call.v.stride);
            to.bias.push_back(0), to.slot.push_back(j), to.number.push_back(keys_of[j]);
        }
        to.n_listed = to.size();
        const int64_t first = of_group(list, group) * list.n_extra;
        for (int64_t f = 0; f < list.n_extra; ++f) {
            const T bias = list.extra_bias[first + f];
            if (bias == -std::numeric_limits<T>::infinity()) continue;
            to.k.push_back(list.extra_keys + (first + f) * call.width);
            to.v.push_back(list.extra_values + (first + f) * call.value_width);
            to.bias.push_back(bias), to.slot.push_back(f), to.number.push_back(call.n_keys + group * list.n_extra + f);
        }
    }

    // `out` and `state` are what the queries of the group will be merged into; null in the backward pass.
    void prefetch(const List<T>& list, int64_t group, Prefetch& to, const T* out, const T* state) const {
        constexpr int64_t SIZE = sizeof(T), CACHE = 1 << 20;
        if ((call.n_queries + call.n_keys) * (call.width + call.value_width) * SIZE <= CACHE) return;  // it is there
        const int64_t *queries_of = queries(list, group), *keys_of = keys(list, group);
        to.add(q, call.q.stride * SIZE, call.width * SIZE, queries_of, list.slots);
        to.add(k, call.k.stride * SIZE, call.width * SIZE, keys_of, list.size);
        to.add(v, call.v.stride * SIZE, call.value_width * SIZE, keys_of, list.size);
        if (out == nullptr) return;
        to.add(out, call.value_width * SIZE, call.value_width * SIZE, queries_of, list.slots);
        to.add(state, 2 * SIZE, 2 * SIZE, queries_of, list.slots);
    }
};

// Memory of one thread, kept from call to call.
template <class T>
class Buffer {
   public:
    T* get(int64_t n) {
        if (n > size_) {
            std::free(data_);
            size_ = n;
            data_ = static_cast<T*>(std::aligned_alloc(64, round_up(n * sizeof(T), 64)));
            if (data_ == nullptr) throw std::bad_alloc();
        }
        return data_;
    }
    ~Buffer() { std::free(data_); }

   private:
    T* data_ = nullptr;
    int64_t size_ = 0;
};

template <class T>
struct Scratch {
    Keys<T> keys;
    Prefetch prefetch;
    Buffer<T> queries, query_rows, grads, grad_rows, scores, dscores, key_rows, values, out, part;
    std::vector<const T*> rows, weights;

    static Scratch& mine() {
        static thread_local Scratch scratch;
        return scratch;
    }
};

// Weights exp(S − shift) of a block in place of its scores, with everything that belongs to a pair: bias, causality,
// repeats. Returns nothing that is hidden: its weight is zero.
template <class T>
struct Pairs {
    const Call<T>& call;
    const List<T>& list;
    const Row<T>& row;
    int64_t list_number, group, first_query;
    const Keys<T>& keys;
    uint32_t by_query[I];
    uint32_t stream = 0;

    Pairs(const Call<T>& c, const List<T>& l, const Row<T>& r, int64_t h, int64_t g, int64_t first, int64_t n,
          const Keys<T>& k)
        : call(c), list(l), row(r), list_number(h), group(g), first_query(first), keys(k) {
        if (!call.dropout) return;
        stream = stream_of(call.seed, list_number * call.batch * call.heads + row.number);
        const int64_t* queries = row.queries(list, group) + first;
        for (int64_t i = 0; i < I; ++i) by_query[i] = i < n ? mix(static_cast<uint32_t>(queries[i]) ^ stream) : 0;
    }

    // Bias and causality of one key's scores.
    void mask(int64_t j, T* scores, int64_t columns) const {
        constexpr int W = Simd<T>::W;
        if (j >= keys.n_listed) {
            for (int64_t i = 0; i < columns; i += W) store(scores + i, load(scores + i) + keys.bias[j]);
        } else if (list.causal) {
            const int64_t hidden = std::min(columns, std::max<int64_t>(0, keys.slot[j] - first_query));
            for (int64_t i = 0; i < hidden; ++i) scores[i] = -std::numeric_limits<T>::infinity();
        }
    }
    bool has_masks() const { return list.causal || list.n_extra > 0; }

    // Divides the weights of one key by how often its pairs meet.
    void divide(int64_t j, T* weights, int64_t n) const {
        if (list.repeats == nullptr || j >= keys.n_listed) return;
        const int16_t* times = list.repeats + (row.of_group(list, group) * list.slots + first_query) * list.size;
        for (int64_t i = 0; i < n; ++i) weights[i] /= times[i * list.size + keys.slot[j]];
    }

    // Dropout's factor of a pair.
    T kept(int64_t j, int64_t i) const {
        const uint32_t by_key = mix((static_cast<uint32_t>(keys.number[j]) + 0x5BD1E995u) ^ stream);
        return mix(by_query[i] ^ by_key) >= call.threshold ? call.grow : T(0);
    }
};

// Weights exp(S − top) in place of the scores of a block, for V vectors of queries; `top` and `sum` go on from the
// blocks before, whose results have to be multiplied by `factor`.
template <class T, int V>
inline void softmax_of(T* scores, int64_t size, T* top, T* sum, T* factor) {
    constexpr int W = Simd<T>::W;
    const Vec<T> nothing = fill(-std::numeric_limits<T>::infinity());
    Vec<T> shift[V], total[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) shift[v] = load(top + v * W);
    for (int64_t j = 0; j < size; ++j)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) shift[v] = larger<T>(load(scores + j * I + v * W), shift[v]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
        const Vec<T> before = load(top + v * W);
        store(top + v * W, shift[v]);
        shift[v] = shift[v] == nothing ? Vec<T>{} : shift[v];  // no key yet: exp(-inf - 0) = 0
        const Vec<T> change = exponential(before - shift[v]);
        store(factor + v * W, change);
        total[v] = load(sum + v * W) * change;
    }
    for (int64_t j = 0; j < size; ++j)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            T* at = scores + j * I + v * W;
            const Vec<T> weight = exponential(load(at) - shift[v]);
            store(at, weight);
            total[v] += weight;
        }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(sum + v * W, total[v]);
}

template <class T>
void softmax(T* scores, int64_t size, int64_t columns, T* top, T* sum, T* factor) {
    constexpr int W = Simd<T>::W;
    int64_t i = 0;
    for (; i + 4 * W <= columns; i += 4 * W) softmax_of<T, 4>(scores + i, size, top + i, sum + i, factor + i);
    for (; i < columns; i += W) softmax_of<T, 1>(scores + i, size, top + i, sum + i, factor + i);
}

// Eq. 9: what queries have found in a group, merged into what they have found before, both by their shares of the
// softmax mass, relative to the larger base. `state` is base and mass of each query; after the last list the output is
// divided by the mass, and the mass is -1: finished.
template <class T>
void merge(const Call<T>& call, const int64_t* queries, int64_t n, const T* found, int64_t ld, const T* top, const T* sum,
           bool any, T* out, T* state, T* lse, bool last) {
    constexpr int W = Simd<T>::W;
    const T infinity = std::numeric_limits<T>::infinity();
    if (!any && !last) return;
    alignas(64) T base[I], mass[I], ours[I], before[I];
    for (int64_t i = 0; i < round_up(n, W); ++i) {
        const bool there = i < n && queries[i] >= 0;
        base[i] = there ? state[2 * queries[i]] : -infinity, mass[i] = there ? state[2 * queries[i] + 1] : T(0);
    }
    for (int64_t i = 0; i < n; i += W) {
        const Vec<T> was = load(base + i), now = larger<T>(was, load(top + i));
        const Vec<T> shift = now == fill(-infinity) ? Vec<T>{} : now;
        const Vec<T> a = exponential(was - shift), b = exponential(load(top + i) - shift);
        const Vec<T> total = load(mass + i) * a + load(sum + i) * b;
        const Vec<T> divisor = last ? (total == Vec<T>{} ? fill(T(1)) : total) : fill(T(1));
        store(base + i, now), store(mass + i, total), store(before + i, a / divisor), store(ours + i, b / divisor);
    }
    for (int64_t i = 0; i < n; ++i) {
        const int64_t query = queries[i];
        if (query < 0) continue;
        T* to = out + query * call.value_width;
        const T* from = found + i * ld;
        const T a = before[i], b = ours[i];
        const bool first = state[2 * query + 1] == T(0);
        int64_t e = 0;
        if (!any) {
            for (; e < call.value_width; ++e) to[e] = first ? T(0) : to[e] * a;
        } else if (first) {
            for (; e + W <= call.value_width; e += W) store(to + e, load(from + e) * b);
            for (; e < call.value_width; ++e) to[e] = from[e] * b;
        } else {
            for (; e + W <= call.value_width; e += W) store(to + e, load(to + e) * a + load(from + e) * b);
            for (; e < call.value_width; ++e) to[e] = to[e] * a + from[e] * b;
        }
        state[2 * query] = base[i], state[2 * query + 1] = last ? T(-1) : mass[i];
        if (last) lse[query] = base[i] + std::log(mass[i]);
    }
}

// One group of one list: its queries meet its keys, and what they find is merged into what they have found before.
template <class T>
void forward_group(const Row<T>& row, int64_t list_number, int64_t group, T* out, T* state, T* lse, bool last,
                   Scratch<T>& scratch) {
    constexpr int W = Simd<T>::W;
    const Call<T>& call = row.call;
    const List<T>& list = call.lists[list_number];
    Keys<T>& keys = scratch.keys;
    row.collect(list, group, keys);
    const int64_t n_keys = keys.size(), value_columns = round_up(call.value_width, W);
    const int64_t n_blocks = (n_keys + J - 1) / J;
    const int64_t n_products = ((list.slots + I - 1) / I) * (n_blocks > 0 ? n_blocks : 1);
    const int64_t tiles = n_products * (std::min<int64_t>(n_keys, J) + std::min<int64_t>(list.slots, I)) / TILE_ROWS;
    const int64_t pace = scratch.prefetch.pace(std::max<int64_t>(1, tiles));
    T* packed = scratch.queries.get(call.width * I);
    T* scores = scratch.scores.get(J * I);
    T* values = scratch.values.get(J * value_columns);
    T* found = scratch.out.get(I * value_columns);
    const T infinity = std::numeric_limits<T>::infinity();
    alignas(64) T top[I], sum[I], factor[I];

    for (int64_t first = 0; first < list.slots; first += I) {
        const int64_t n = std::min<int64_t>(I, list.slots - first), columns = round_up(n, W);
        const int64_t* queries = row.queries(list, group) + first;
        scratch.rows.assign(I, nullptr);
        for (int64_t i = 0; i < n; ++i)
            if (queries[i] >= 0) scratch.rows[i] = row.q + queries[i] * call.q.stride;
        pack_columns(scratch.rows.data(), n, call.width, call.scale, packed);
        const Pairs<T> pairs(call, list, row, list_number, group, first, n, keys);
        for (int64_t i = 0; i < columns; ++i) top[i] = -infinity, sum[i] = 0;

        int64_t seen = n_keys;  // by any query of this block
        if (list.causal)
            while (seen > 0 && keys.slot[seen - 1] > first + n - 1) --seen;
        for (int64_t start = 0; start < seen; start += J) {
            const int64_t size = std::min<int64_t>(J, seen - start);
            product(keys.k.data() + start, size, 1, packed, I, columns, call.width, scores, I, false, scratch.prefetch,
                    pace);
            if (n_blocks > 1 || first == 0)
                pack_rows(keys.v.data() + start, std::min<int64_t>(J, n_keys - start), call.value_width, value_columns,
                          T(1), values);
            if (pairs.has_masks())
                for (int64_t j = 0; j < size; ++j) pairs.mask(start + j, scores + j * I, columns);
            softmax<T>(scores, size, columns, top, sum, factor);
            if (list.repeats != nullptr) {  // counted anew: the sums are of divided weights
                for (int64_t i = 0; i < n; ++i) {
                    for (int64_t j = 0; j < size; ++j) sum[i] -= scores[j * I + i];
                }
                for (int64_t j = 0; j < size; ++j) pairs.divide(start + j, scores + j * I, n);
                for (int64_t j = 0; j < size; ++j)
                    for (int64_t i = 0; i < n; ++i) sum[i] += scores[j * I + i];
            }
            if (call.dropout)
                for (int64_t j = 0; j < size; ++j)
                    for (int64_t i = 0; i < n; ++i) scores[j * I + i] *= pairs.kept(start + j, i);
            if (start > 0)
                for (int64_t i = 0; i < n; ++i)
                    for (int64_t e = 0; e < value_columns; e += W)
                        store(found + i * value_columns + e, load(found + i * value_columns + e) * factor[i]);
            scratch.weights.resize(I);
            for (int64_t i = 0; i < n; ++i) scratch.weights[i] = scores + i;
            product(scratch.weights.data(), n, I, values, value_columns, value_columns, size, found, value_columns,
                    start > 0, scratch.prefetch, pace);
        }
        merge<T>(call, queries, n, found, value_columns, top, sum, seen > 0, out, state, lse, last);
    }
}

// Runs `work(task)` for all tasks, in their order as far as several threads do.
template <class Work>
void run(int64_t n_tasks, int threads, const Work& work) {
    std::atomic<int64_t> next{0};
    const int team = static_cast<int>(std::min<int64_t>(threads, n_tasks));
    if (team <= 1) {
        for (int64_t task = 0; task < n_tasks; ++task) work(task);
        return;
    }
#pragma omp parallel num_threads(team)
    for (int64_t task = next++; task < n_tasks; task = next++) work(task);
}

template <class T>
void forward(const Call<T>& call, const Forward<T>& result) {
    const int64_t n_rows = call.batch * call.heads, n_lists = static_cast<int64_t>(call.lists.size());
    std::unique_ptr<T[]> state(new T[2 * n_rows * call.n_queries]);  // base and mass of each query
    // Lists of a row come one after the other: each query is merged in their order, whatever the threads do. Rows that
    // do not go round among the threads are cut into blocks of groups, and a block waits for the list before its own.
    constexpr int64_t BLOCK = 8;
    struct Task {
        int64_t row, list, first, last;  // list -1: the whole row
    };
    const int64_t n_whole = call.threads > 1 ? n_rows / call.threads * call.threads : n_rows;
    std::vector<Task> tasks;
    for (int64_t row = 0; row < n_whole; ++row) tasks.push_back({row, -1, 0, 0});
    for (int64_t row = n_whole; row < n_rows; ++row)
        for (int64_t h = 0; h < n_lists; ++h)
            for (int64_t g = 0; g < call.lists[h].n_groups; g += BLOCK)
                tasks.push_back({row, h, g, std::min(g + BLOCK, call.lists[h].n_groups)});
    std::vector<std::atomic<int64_t>> open((n_rows - n_whole) * n_lists);
    for (auto& count : open) count = 0;
    for (const Task& task : tasks)
        if (task.list >= 0) ++open[(task.row - n_whole) * n_lists + task.list];
    for (int64_t i = 0; i < n_rows * call.n_queries; ++i)
        state[2 * i] = -std::numeric_limits<T>::infinity(), state[2 * i + 1] = 0;

    const auto some = [&](const Row<T>& row, int64_t h, int64_t first, int64_t last) {
        const int64_t at = row.number * call.n_queries;
        T *out = result.out + at * call.value_width, *its = state.get() + 2 * at;
        Scratch<T>& scratch = Scratch<T>::mine();
        for (int64_t g = first; g < last; ++g) {
            scratch.prefetch.clear();
            if (g + 1 < last) row.prefetch(call.lists[h], g + 1, scratch.prefetch, out, its);
            forward_group(row, h, g, out, its, result.lse + at, h == n_lists - 1, scratch);
        }
    };
    const auto finish = [&](const Row<T>& row) {  // queries that are not in the last list
        for (int64_t i = row.number * call.n_queries; i < (row.number + 1) * call.n_queries; ++i) {
            const T base = state[2 * i], mass = state[2 * i + 1];
            if (mass == T(-1)) continue;
            T* to = result.out + i * call.value_width;
            for (int64_t e = 0; e < call.value_width; ++e) to[e] = mass == T(0) ? T(0) : to[e] / mass;
            result.lse[i] = base + std::log(mass);
        }
    };
    run(static_cast<int64_t>(tasks.size()), call.threads, [&](int64_t number) {
        const Task& task = tasks[number];
        const Row<T> row(call, task.row);
        if (task.list < 0) {
            for (int64_t h = 0; h < n_lists; ++h) some(row, h, 0, call.lists[h].n_groups);
            finish(row);
            return;
        }
        std::atomic<int64_t>* counts = open.data() + (task.row - n_whole) * n_lists;
        if (task.list > 0)
            while (counts[task.list - 1].load(std::memory_order_acquire) > 0) std::this_thread::yield();
        some(row, task.list, task.first, task.last);
        if (counts[task.list].fetch_sub(1, std::memory_order_acq_rel) == 1 && task.list == n_lists - 1) finish(row);
    });
}

// Gradients of one group; P = exp(S − LSE) with the log-sum-exp of all lists is the final weight of a pair, and the
// gradients of lists simply add up.
template <class T>
void backward_group(const Row<T>& row, int64_t list_number, int64_t group, const Backward<T>& result, const T* grad,
                    const T* delta, T* dq, T* dk, T* dv, Scratch<T>& scratch) {
    constexpr int W = Simd<T>::W;
    const Call<T>& call = row.call;
    const List<T>& list = call.lists[list_number];
    Keys<T>& keys = scratch.keys;
    row.collect(list, group, keys);
    const int64_t n_keys = keys.size();
    const int64_t key_columns = round_up(call.width, W), value_columns = round_up(call.value_width, W);
    const int64_t n_blocks = (n_keys + J - 1) / J;
    const int64_t tiles =
        ((list.slots + I - 1) / I) * std::max<int64_t>(1, n_blocks) * (4 * std::min<int64_t>(n_keys, J)) / TILE_ROWS;
    const int64_t pace = scratch.prefetch.pace(std::max<int64_t>(1, tiles));
    T* packed = scratch.queries.get(call.width * I);
    T* packed_grad = scratch.grads.get(call.value_width * I);
    T* query_rows = scratch.query_rows.get(I * key_columns);
    T* grad_rows = scratch.grad_rows.get(I * value_columns);
    T* weights = scratch.scores.get(J * I);
    T* dscores = scratch.dscores.get(J * I);
    T* key_rows = scratch.key_rows.get(J * key_columns);
    T* found = scratch.out.get(I * key_columns);
    T* part = scratch.part.get(J * std::max(key_columns, value_columns));
    const T infinity = std::numeric_limits<T>::infinity();
    alignas(64) T lse[I], less[I];
    const int64_t at = row.number * call.n_queries, first_extra = row.of_group(list, group) * list.n_extra;

    for (int64_t first = 0; first < list.slots; first += I) {
        const int64_t n = std::min<int64_t>(I, list.slots - first), columns = round_up(n, W);
        const int64_t* queries = row.queries(list, group) + first;
        scratch.rows.assign(2 * I, nullptr);
        const T **q_rows = scratch.rows.data(), **g_rows = q_rows + I;
        for (int64_t i = 0; i < I; ++i) {
            const int64_t query = i < n ? queries[i] : -1;
            // A query without any key, and an empty slot, has no weights: exp(S − inf) is zero.
            lse[i] = query < 0 || result.lse[at + query] == -infinity ? infinity : result.lse[at + query];
            less[i] = query < 0 ? T(0) : delta[query];
            if (query < 0) continue;
            q_rows[i] = row.q + query * call.q.stride;
            g_rows[i] = grad + query * result.grad.stride;
        }
        pack_columns(q_rows, n, call.width, call.scale, packed);
        pack_columns(g_rows, n, call.value_width, T(1), packed_grad);
        pack_rows(q_rows, n, call.width, key_columns, call.scale, query_rows);
        pack_rows(g_rows, n, call.value_width, value_columns, T(1), grad_rows);
        const Pairs<T> pairs(call, list, row, list_number, group, first, n, keys);
        int64_t seen = n_keys;
        if (list.causal)
            while (seen > 0 && keys.slot[seen - 1] > first + n - 1) --seen;
        for (int64_t start = 0; start < seen; start += J) {
            const int64_t size = std::min<int64_t>(J, seen - start);
            product(keys.k.data() + start, size, 1, packed, I, columns, call.width, weights, I, false,
                    scratch.prefetch, pace);
            product(keys.v.data() + start, size, 1, packed_grad, I, columns, call.value_width, dscores, I, false,
                    scratch.prefetch, pace);  // dO Vᵀ
            for (int64_t j = 0; j < size; ++j) {
                T *w = weights + j * I, *d = dscores + j * I;
                if (pairs.has_masks()) pairs.mask(start + j, w, columns);
                for (int64_t i = 0; i < columns; i += W) store(w + i, exponential(load(w + i) - load(lse + i)));
                pairs.divide(start + j, w, n);
                if (call.dropout) {
                    for (int64_t i = 0; i < n; ++i) {
                        const T kept = pairs.kept(start + j, i), weight = w[i];
                        w[i] = weight * kept;
                        d[i] = weight * (d[i] * kept - less[i]);
                    }
                } else {  // dS = P ∘ (dO Vᵀ − δ)
                    for (int64_t i = 0; i < columns; i += W)
                        store(d + i, load(w + i) * (load(d + i) - load(less + i)));
                }
                if (start + j >= keys.n_listed) {
                    T total = 0;
                    for (int64_t i = 0; i < n; ++i) total += d[i];
                    list.d_extra_bias[first_extra + keys.slot[start + j]] += total;
                }
            }
            // Rows of keys and values: Σ_i dS q and Σ_i P dO.
            scratch.weights.resize(2 * J);
            for (int64_t j = 0; j < size; ++j) scratch.weights[j] = weights + j * I, scratch.weights[J + j] = dscores + j * I;
            product(scratch.weights.data(), size, 1, grad_rows, value_columns, value_columns, n, part, value_columns,
                    false, scratch.prefetch, pace);
            for (int64_t j = 0; j < size; ++j) {
                const bool listed = start + j < keys.n_listed;
                T* to = listed ? dv + keys.number[start + j] * call.value_width
                               : list.d_extra_values + (first_extra + keys.slot[start + j]) * call.value_width;
                for (int64_t e = 0; e < call.value_width; ++e) to[e] += part[j * value_columns + e];
            }
            product(scratch.weights.data() + J, size, 1, query_rows, key_columns, key_columns, n, part, key_columns,
                    false, scratch.prefetch, pace);
            for (int64_t j = 0; j < size; ++j) {
                const bool listed = start + j < keys.n_listed;
                T* to = listed ? dk + keys.number[start + j] * call.width
                               : list.d_extra_keys + (first_extra + keys.slot[start + j]) * call.width;
                for (int64_t d = 0; d < call.width; ++d) to[d] += part[j * key_columns + d];
            }
            // Rows of queries: Σ_j dS k.
            pack_rows(keys.k.data() + start, size, call.width, key_columns, call.scale, key_rows);
            for (int64_t i = 0; i < n; ++i) scratch.weights[i] = dscores + i;
            product(scratch.weights.data(), n, I, key_rows, key_columns, key_columns, size, found, key_columns,
                    start > 0, scratch.prefetch, pace);
        }
        if (seen == 0) continue;
        for (int64_t i = 0; i < n; ++i) {
            if (queries[i] < 0) continue;
            T* to = dq + queries[i] * call.width;
            for (int64_t d = 0; d < call.width; ++d) to[d] += found[i * key_columns + d];
        }
    }
}

template <class T>
void backward(const Call<T>& call, const Backward<T>& result) {
    const int64_t n_kv = call.batch * call.kv_heads, repeat = call.heads / call.kv_heads;
    const int64_t n_lists = static_cast<int64_t>(call.lists.size());
    const int64_t dq_size = repeat * call.n_queries * call.width;
    const int64_t dk_size = call.n_keys * call.width, dv_size = call.n_keys * call.value_width;
    // Heads that share keys add to the same rows, and so do groups: one thread at a time. Where heads are few, groups are
    // cut into parts with sums of their own. How many is a matter of shapes alone: results do not depend on threads.
    const int64_t n_parts = n_kv >= 4 ? 1 : 4 / n_kv;
    std::vector<T> sums((n_parts - 1) * n_kv * (dq_size + dk_size + dv_size));
    std::vector<T> delta(call.batch * call.heads * call.n_queries);
    run(n_kv * repeat, call.threads, [&](int64_t number) {
        const T* grad = result.grad.data + number / call.heads * result.grad.batch_stride +
                        number % call.heads * result.grad.head_stride;
        for (int64_t i = 0; i < call.n_queries; ++i) {
            const T *g = grad + i * result.grad.stride, *o = result.out + (number * call.n_queries + i) * call.value_width;
            T total = 0;
            for (int64_t e = 0; e < call.value_width; ++e) total += g[e] * o[e];
            delta[number * call.n_queries + i] = total;
        }
    });
    const auto place = [&](int64_t kv, int64_t part, T*& dq, T*& dk, T*& dv) {
        dq = result.dq + kv * dq_size, dk = result.dk + kv * dk_size, dv = result.dv + kv * dv_size;
        if (part == 0) return;
        dq = sums.data() + ((part - 1) * n_kv + kv) * (dq_size + dk_size + dv_size);
        dk = dq + dq_size, dv = dk + dk_size;
    };
    run(n_kv * n_parts, call.threads, [&](int64_t task) {
        const int64_t kv = task / n_parts, part = task % n_parts;
        T *dq, *dk, *dv;
        place(kv, part, dq, dk, dv);
        Scratch<T>& scratch = Scratch<T>::mine();
        for (int64_t r = 0; r < repeat; ++r) {
            const Row<T> row(call, kv * repeat + r);
            const T* grad = result.grad.data + row.number / call.heads * result.grad.batch_stride +
                            row.number % call.heads * result.grad.head_stride;
            for (int64_t h = 0; h < n_lists; ++h) {
                const int64_t n_groups = call.lists[h].n_groups;
                const int64_t last = n_groups * (part + 1) / n_parts;
                for (int64_t g = n_groups * part / n_parts; g < last; ++g) {
                    scratch.prefetch.clear();
                    if (g + 1 < last) row.prefetch(call.lists[h], g + 1, scratch.prefetch, nullptr, nullptr);
                    backward_group(row, h, g, result, grad, delta.data() + row.number * call.n_queries,
                                   dq + r * call.n_queries * call.width, dk, dv, scratch);
                }
            }
        }
    });
    if (n_parts == 1) return;
    run(n_kv, call.threads, [&](int64_t kv) {
        T *dq, *dk, *dv;
        place(kv, 0, dq, dk, dv);
        for (int64_t part = 1; part < n_parts; ++part) {
            T *q, *k, *v;
            place(kv, part, q, k, v);
            for (int64_t i = 0; i < dq_size; ++i) dq[i] += q[i];
            for (int64_t i = 0; i < dk_size; ++i) dk[i] += k[i];
            for (int64_t i = 0; i < dv_size; ++i) dv[i] += v[i];
        }
    });
}
