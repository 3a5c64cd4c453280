// Hashes of queries and keys and their orders (eqs. 4 and 8 of the paper). Included once per instruction set, inside its
// namespace.

// Inner products of up to I vectors with all directions, and their squared norms: products[h][i], norms[i].
template <class T>
void project(const T* x, int64_t stride, int64_t n, int64_t width, const T* directions, int64_t direction_stride,
             int64_t n_directions, T* products, int64_t length, T* norms) {
    constexpr int W = Simd<T>::W;
    const int64_t columns = round_up(n, W);
    const T* rows[I];
    for (int64_t i = 0; i < n; ++i) rows[i] = x + i * stride;
    Scratch<T>& scratch = Scratch<T>::mine();
    scratch.prefetch.clear();
    T* packed = scratch.queries.get(width * I);
    T* found = scratch.scores.get(std::max<int64_t>(J, n_directions) * I);
    pack_columns(rows, n, width, T(1), packed);
    product<T>(Strided<T>{directions, direction_stride}, n_directions, 1, Strided<T>{packed, I}, columns, width,
               Store<T>{found, I}, scratch.prefetch);
    for (int64_t h = 0; h < n_directions; ++h) std::memcpy(products + h * length, found + h * I, n * sizeof(T));
    for (int64_t i = 0; i < columns; i += W) {
        Vec<T> sum{};
        for (int64_t d = 0; d < width; ++d) sum += load(packed + d * I + i) * load(packed + d * I + i);
        store(found + i, sum);
    }
    std::memcpy(norms, found, n * sizeof(T));
}

// The largest norm of all vectors that may be seen. One with inf or NaN must not decide where all the others go.
template <class T>
T largest_finite(const T* norms, const bool* mask, int64_t n) {
    T largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        const bool counts = norms[i] < std::numeric_limits<T>::infinity() && (mask == nullptr || mask[i]);
        largest = counts && norms[i] > largest ? norms[i] : largest;
    }
    return largest;
}

// Numbers whose order is that of the hashes, as unsigned integers; NaN comes behind all hashes, masked places come behind
// everything.
template <class T>
void hash(const T* products, const T* norms, const bool* mask, int64_t n, T scale, T radius_sq, T of_rest, uint32_t* bits) {
    for (int64_t i = 0; i < n; ++i) {
        const T rest = radius_sq - norms[i] * scale * scale;  // rounding can make that of the longest vector negative
        const float found = static_cast<float>(products[i] * scale + of_rest * std::sqrt(rest < T(0) ? T(0) : rest));
        uint32_t number;
        std::memcpy(&number, &found, sizeof number);
        number = (number & 0x7FFFFFFFu) > 0x7F800000u ? 0x7F800000u : number;
        bits[i] = number & 0x80000000u ? ~number : number | 0x80000000u;
    }
    if (mask == nullptr) return;
    for (int64_t i = 0; i < n; ++i) bits[i] = mask[i] ? bits[i] : 0xFFFFFFFFu;
}

// The order of numbers, by a radix sort of pairs (number, place), from the last digit to the first; equal ones keep theirs.
template <int BITS>
void argsort(const uint32_t* numbers, int64_t n, int32_t* order) {
    constexpr int PASSES = (32 + BITS - 1) / BITS, VALUES = 1 << BITS;
    const auto digit = [](uint32_t number, int pass) { return number >> (BITS * pass) & (VALUES - 1); };
    static thread_local Buffer<uint64_t> pairs[2];
    uint64_t *from = pairs[0].get(n), *to = pairs[1].get(n);
    uint32_t starts[PASSES][VALUES] = {};
    for (int64_t i = 0; i < n; ++i)
        for (int pass = 0; pass < PASSES; ++pass) ++starts[pass][digit(numbers[i], pass)];
    for (int pass = 0; pass < PASSES; ++pass) {
        uint32_t total = 0;
        for (uint32_t& start : starts[pass]) {
            const uint32_t count = start;
            start = total;
            total += count;
        }
    }
    for (int64_t i = 0; i < n; ++i)
        to[starts[0][digit(numbers[i], 0)]++] = static_cast<uint64_t>(numbers[i]) << 32 | static_cast<uint64_t>(i);
    for (int pass = 1; pass < PASSES - 1; ++pass) {
        std::swap(from, to);
        for (int64_t i = 0; i < n; ++i) to[starts[pass][digit(static_cast<uint32_t>(from[i] >> 32), pass)]++] = from[i];
    }
    for (int64_t i = 0; i < n; ++i)
        order[starts[PASSES - 1][digit(static_cast<uint32_t>(to[i] >> 32), PASSES - 1)]++] =
            static_cast<int32_t>(static_cast<uint32_t>(to[i]));
}

template <class T>
void sort_by_hash(const Hashing<T>& call) {
    const int64_t repeat = call.heads / call.kv_heads, n_kv = call.batch * call.kv_heads, H = call.n_hashes;
    const int64_t N = call.n_queries, M = call.n_keys, D = call.width;
    const int64_t q_blocks = (N + I - 1) / I, k_blocks = (M + I - 1) / I;
    // So many key heads at once that all threads have something to do; what is in between stays small.
    const int64_t at_once = std::min(n_kv, (call.threads + repeat - 1) / repeat);
    static thread_local Buffer<T> memory;
    T* of_queries = memory.get(at_once * (H + 1) * (repeat * N + M));  // products (H, N) and norms (N) of each row
    T* of_keys = of_queries + at_once * repeat * (H + 1) * N;
    for (int64_t first = 0; first < n_kv; first += at_once) {
        const int64_t n = std::min(at_once, n_kv - first);
        run(n * (repeat * q_blocks + k_blocks), call.threads, [&](int64_t task) {
            const bool is_query = task < n * repeat * q_blocks;
            if (!is_query) task -= n * repeat * q_blocks;
            const int64_t blocks = is_query ? q_blocks : k_blocks, length = is_query ? N : M;
            const int64_t place = task / blocks, start = task % blocks * I;
            const int64_t heads = is_query ? call.heads : call.kv_heads;
            const int64_t row = place + first * (is_query ? repeat : 1);
            const Rows<const T>& all = is_query ? call.q : call.k;
            const T* x = all.data + row / heads * all.batch_stride + row % heads * all.head_stride + start * all.stride;
            T* to = (is_query ? of_queries : of_keys) + place * (H + 1) * length;
            project(x, all.stride, std::min<int64_t>(I, length - start), D, call.vectors, D + 2, H, to + start, length,
                    to + H * length + start);
        });
        run(n * repeat * H, call.threads, [&](int64_t task) {
            const int64_t place = task / H, h = task % H, row = place + first * repeat;
            const T* q = of_queries + place * (H + 1) * N;
            const T* k = of_keys + place / repeat * (H + 1) * M;
            const bool* mask = call.mask == nullptr ? nullptr : call.mask + row / call.heads * M;
            // Eq. 4: F(q) = [q; 0; √(M_Q² + M_K² − ‖q‖²)], G(k) = [k; √(M_Q² + M_K² − ‖k‖²); 0].
            const T radius_sq = largest_finite<T>(q + H * N, nullptr, N) * call.scale * call.scale +
                                largest_finite<T>(k + H * M, mask, M);
            const T* a = call.vectors + h * (D + 2) + D;
            static thread_local Buffer<uint32_t> numbers;
            uint32_t* bits = numbers.get(std::max(N, M));
            const auto sort = [&](int64_t length, int32_t* order) {
                // Long digits save a pass, but have many counters.
                length < 512 ? argsort<8>(bits, length, order) : argsort<11>(bits, length, order);
            };
            hash<T>(q + h * N, q + H * N, nullptr, N, call.scale, radius_sq, a[1], bits);
            sort(N, call.q_order + (row * H + h) * N);
            hash<T>(k + h * M, k + H * M, mask, M, T(1), radius_sq, a[0], bits);
            sort(M, call.k_order + (row * H + h) * M);
        });
    }
}
