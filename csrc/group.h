// One group of queries and keys: where its vectors are, and what belongs to its pairs. Included once per instruction set,
// inside its namespace.
//
// Scores stand in base 2, S = log₂e · scale · q·k, so that a weight is 2^(S − …) without a product.

constexpr int J = 256;  // keys of a block

// Blocks of nearly equal size, none larger than `most`.
inline int64_t block_size(int64_t n, int64_t most) {
    const int64_t n_blocks = (n + most - 1) / most;
    return n_blocks == 0 ? 1 : (n + n_blocks - 1) / n_blocks;
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
    std::vector<T> bias;                // of extra keys, in base 2
    std::vector<int64_t> slot, number;  // place in the list of keys; index of the key, for dropout and gradients
    int64_t n_listed = 0, size = 0;

    void reserve(int64_t n) {
        if (static_cast<int64_t>(k.size()) >= n) return;
        k.resize(n), v.resize(n), bias.resize(n), slot.resize(n), number.resize(n);
    }
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
    const int32_t* queries(const List<T>& list, int64_t group) const {
        return list.queries + number * list.queries_stride + group * list.slots;
    }
    const int32_t* keys(const List<T>& list, int64_t group) const {
        return list.keys + number * list.keys_stride + group * list.size;
    }
    int64_t of_group(const List<T>& list, int64_t group) const { return number * list.n_groups + group; }

    // `details`: slots and numbers are wanted too.
    void collect(const List<T>& list, int64_t group, bool details, Keys<T>& to) const {
        to.reserve(list.size + list.n_extra);
        const int32_t* keys_of = keys(list, group);
        const T **to_k = to.k.data(), **to_v = to.v.data();
        int64_t n = 0;
        for (int64_t j = 0; j < list.size; ++j) {
            const int64_t key = keys_of[j];
            if (key < 0) continue;
            to_k[n] = k + key * call.k.stride, to_v[n] = v + key * call.v.stride;
            if (details) to.slot[n] = j, to.number[n] = key;
            ++n;
        }
        to.n_listed = n;
        const int64_t first = of_group(list, group) * list.n_extra;
        for (int64_t f = 0; f < list.n_extra; ++f) {
            const T bias = list.extra_bias[first + f];
            if (bias == -std::numeric_limits<T>::infinity()) continue;
            to_k[n] = list.extra_keys + (first + f) * call.width;
            to_v[n] = list.extra_values + (first + f) * call.value_width;
            to.bias[n] = bias * T(LOG2_E), to.slot[n] = f, to.number[n] = call.n_keys + group * list.n_extra + f;
            ++n;
        }
        to.size = n;
    }

    // `out` is what the queries of the group will be merged into; null in the backward pass.
    void prefetch(const List<T>& list, int64_t group, Prefetch& to, const T* out) const {
        constexpr int64_t SIZE = sizeof(T), CACHE = 1 << 18;
        if ((call.n_queries + call.n_keys) * (call.width + call.value_width) * SIZE <= CACHE) return;  // it is there
        const int32_t *queries_of = queries(list, group), *keys_of = keys(list, group);
        to.add(q, call.q.stride * SIZE, call.width * SIZE, queries_of, list.slots);
        to.add(k, call.k.stride * SIZE, call.width * SIZE, keys_of, list.size);
        to.add(v, call.v.stride * SIZE, call.value_width * SIZE, keys_of, list.size);
        if (out != nullptr)
            to.add(out, call.value_width * SIZE, call.value_width * SIZE, queries_of, list.slots);
    }
};

// Throws if an index is too large: nothing outside of the tensors is read or written.
template <class T>
void check_indices(const Call<T>& call) {
    const auto check = [&](const int32_t* indices, int64_t stride, int64_t n, int64_t length, const char* name) {
        const int64_t n_rows = stride == 0 ? 1 : call.batch * call.heads;
        for (int64_t row = 0; row < n_rows; ++row) {
            int32_t largest = -1;
            for (int64_t i = 0; i < n; ++i) largest = std::max(largest, indices[row * stride + i]);
            if (largest >= length)
                throw std::out_of_range(std::string("groups has the index ") + std::to_string(largest) + " of " + name +
                                        ", which is out of range: there are " + std::to_string(length));
        }
    };
    for (const List<T>& list : call.lists) {
        check(list.queries, list.queries_stride, list.n_groups * list.slots, call.n_queries, "queries");
        check(list.keys, list.keys_stride, list.n_groups * list.size, call.n_keys, "keys");
    }
}

// What one thread works with, kept from call to call.
template <class T>
struct Scratch {
    Keys<T> keys;
    Prefetch prefetch;
    Buffer<T> queries, grads, query_rows, grad_rows, scores, dscores, key_rows, values;
    Buffer<const T*> lists[3];

    static Scratch& mine() {
        static thread_local Scratch scratch;
        return scratch;
    }
};

// What belongs to the pairs of up to I queries of a group and its keys.
template <class T>
struct Pairs {
    const Call<T>& call;
    const List<T>& list;
    const Keys<T>& keys;
    int64_t first, n;  // queries
    const int16_t* repeats = nullptr;
    uint32_t by_query[I];
    uint32_t stream = 0;

    Pairs(const Row<T>& row, int64_t list_number, int64_t group, int64_t first_query, int64_t n_queries, const Keys<T>& k)
        : call(row.call), list(call.lists[list_number]), keys(k), first(first_query), n(n_queries) {
        if (list.repeats != nullptr)
            repeats = list.repeats + (row.of_group(list, group) * list.slots + first) * list.size;
        if (!call.dropout) return;
        stream = stream_of(call.seed, list_number * call.batch * call.heads + row.number);
        const int32_t* queries = row.queries(list, group) + first;
        for (int64_t i = 0; i < I; ++i) by_query[i] = i < n ? mix(static_cast<uint32_t>(queries[i]) ^ stream) : 0;
    }

    // How many of the keys any of the queries sees.
    int64_t seen() const {
        int64_t found = keys.size;
        if (list.causal)
            while (found > 0 && keys.slot[found - 1] > first + n - 1) --found;
        return found;
    }

    // The first of the queries that sees a key.
    int64_t first_seeing() const { return list.causal ? std::max<int64_t>(0, keys.slot[0] - first) : 0; }

    // Adds to the scores of one key what its pairs have: a bias, -inf where it must not be seen, and the logarithm of how
    // often a pair meets, by which its weight is divided.
    void adjust(int64_t j, T* scores, int64_t columns) const {
        constexpr int W = Simd<T>::W;
        if (j >= keys.n_listed) {
            for (int64_t i = 0; i < columns; i += W) store(scores + i, load(scores + i) + keys.bias[j]);
            return;
        }
        if (list.causal) {
            const int64_t hidden = std::min(columns, std::max<int64_t>(0, keys.slot[j] - first));
            for (int64_t i = 0; i < hidden; ++i) scores[i] = -std::numeric_limits<T>::infinity();
        }
        if (repeats != nullptr)
            for (int64_t i = 0; i < n; ++i) {
                const int16_t times = repeats[i * list.size + keys.slot[j]];
                if (times > 1) scores[i] -= std::log2(T(times));
            }
    }
    bool has_adjustments() const { return list.causal || list.n_extra > 0 || repeats != nullptr; }

    // Dropout's factor of a pair.
    T kept(int64_t j, int64_t i) const {
        const uint32_t by_key = mix((static_cast<uint32_t>(keys.number[j]) + 0x5BD1E995u) ^ stream);
        return mix(by_query[i] ^ by_key) >= call.threshold ? call.grow : T(0);
    }
};
