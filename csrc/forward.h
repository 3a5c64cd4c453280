// `attend`, forward. Included once per instruction set, inside its namespace.
//
// A group is cut into blocks of I queries and J keys. Scores stand transposed, keys × queries: then a row of keys is
// read where it lies, one number at a time, against queries that are packed side by side; maximum, power and sum run
// over whole vectors without a horizontal step; and the weights of a key are side by side for the second product, whose
// vectors are rows of values. What a block finds is merged into the output as the product leaves its registers.

// Weights 2^(S − top) in place of the scores, for V vectors of queries; their largest score and their sum.
template <class T, int V>
inline void softmax_of(T* scores, int64_t size, T* top, T* sum) {
    constexpr int W = Simd<T>::W;
    const Vec<T> nothing = fill(-std::numeric_limits<T>::infinity());
    Vec<T> shift[V], total[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) shift[v] = nothing;
    for (int64_t j = 0; j < size; ++j)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) shift[v] = larger<T>(load(scores + j * I + v * W), shift[v]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
        store(top + v * W, shift[v]);
        shift[v] = shift[v] == nothing ? Vec<T>{} : shift[v];  // no key: 2^(-inf − 0) = 0
        total[v] = Vec<T>{};
    }
    for (int64_t j = 0; j < size; ++j)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            T* at = scores + j * I + v * W;
            const Vec<T> weight = power(load(at) - shift[v]);
            store(at, weight);
            total[v] += weight;
        }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(sum + v * W, total[v]);
}

template <class T>
void softmax(T* scores, int64_t size, int64_t columns, T* top, T* sum) {
    constexpr int W = Simd<T>::W;
    int64_t i = 0;
    for (; i + 4 * W <= columns; i += 4 * W) softmax_of<T, 4>(scores + i, size, top + i, sum + i);
    for (; i < columns; i += W) softmax_of<T, 1>(scores + i, size, top + i, sum + i);
}

// Eq. 9: the shares of what queries have found before and of what they find in a block, by their parts of the softmax
// mass. `state` is base and mass of each query: Σ 2^S = mass · 2^base. `keep` is zero for what is not there yet. Queries from
// `n_hopeful` on have seen keys, all of them: where no score was above -inf the result is NaN, as that of any softmax.
template <class T>
void merge_shares(const int32_t* queries, int64_t n, int64_t n_hopeful, const T* top, const T* sum, T* state, T* keep,
                  T* share) {
    constexpr int W = Simd<T>::W;
    const T infinity = std::numeric_limits<T>::infinity();
    alignas(64) T base[I], mass[I], nothing[I];
    for (int64_t i = 0; i < round_up(n, W); ++i) {
        const bool there = i < n && queries[i] >= 0;
        base[i] = there ? state[2 * static_cast<int64_t>(queries[i])] : -infinity;
        mass[i] = there ? state[2 * static_cast<int64_t>(queries[i]) + 1] : T(0);
        nothing[i] = i >= n_hopeful ? std::numeric_limits<T>::quiet_NaN() : T(0);
    }
    for (int64_t i = 0; i < n; i += W) {
        const Vec<T> was = load(base + i), now = larger<T>(was, load(top + i));
        const Vec<T> shift = now == fill(-infinity) ? Vec<T>{} : now;
        const Vec<T> a = load(mass + i) * power(was - shift), b = power(load(top + i) - shift);
        Vec<T> total = a + load(sum + i) * b;
        total = total == Vec<T>{} ? load(nothing + i) : total;
        const Vec<T> part = T(1) / (total == Vec<T>{} ? fill(T(1)) : total);
        store(base + i, now), store(mass + i, total), store(keep + i, a * part), store(share + i, b * part);
    }
    for (int64_t i = 0; i < n; ++i) {
        if (queries[i] < 0) continue;
        T* to = state + 2 * static_cast<int64_t>(queries[i]);
        to[0] = base[i], to[1] = mass[i];
    }
}

// One group of one list: its queries meet its keys, and what they find is merged into what they have found before.
template <class T>
void forward_group(const Row<T>& row, int64_t list_number, int64_t group, T* out, T* state, Scratch<T>& scratch) {
    constexpr int W = Simd<T>::W;
    const Call<T>& call = row.call;
    const List<T>& list = call.lists[list_number];
    Keys<T>& keys = scratch.keys;
    row.collect(list, group, list.causal || list.repeats != nullptr || call.dropout, keys);
    if (keys.size == 0) return;
    const int64_t value_columns = round_up(call.value_width, W), most = block_size(keys.size, J);
    T* packed = scratch.queries.get(call.width * I);
    T* scores = scratch.scores.get(J * I);
    const T** value_rows = scratch.lists[0].get(J);
    alignas(64) T top[I], sum[I], keep[I], share[I];
    const T* q_rows[I];
    T* out_rows[I];

    for (int64_t first = 0; first < list.slots; first += I) {
        const int64_t n = std::min<int64_t>(I, list.slots - first), columns = round_up(n, W);
        const int32_t* queries = row.queries(list, group) + first;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t query = queries[i];
            q_rows[i] = query < 0 ? nullptr : row.q + query * call.q.stride;
            out_rows[i] = query < 0 ? nullptr : out + query * call.value_width;
        }
        pack_columns(q_rows, n, call.width, call.scale * T(LOG2_E), packed);
        const Pairs<T> pairs(row, list_number, group, first, n, keys);
        const int64_t seen = pairs.seen();
        for (int64_t start = 0; start < seen; start += most) {
            const int64_t size = std::min(most, seen - start);
            product<T>(Listed<T>{keys.k.data() + start}, size, 1, Strided<T>{packed, I}, columns, call.width,
                       Store<T>{scores, I}, scratch.prefetch);
            if (pairs.has_adjustments())
                for (int64_t j = 0; j < size; ++j) pairs.adjust(start + j, scores + j * I, columns);
            softmax<T>(scores, size, columns, top, sum);
            if (call.dropout)
                for (int64_t j = 0; j < size; ++j)
                    for (int64_t i = 0; i < n; ++i) scores[j * I + i] *= pairs.kept(start + j, i);
            merge_shares<T>(queries, n, start + size < seen ? n : pairs.first_seeing(), top, sum, state, keep, share);
            const Listed<T> values =
                whole_vectors(keys.v.data() + start, size, call.value_width, value_rows, scratch.values);
            product<T>(Strided<T>{scores, 1}, n, I, values, value_columns, size,
                       Into<T>{out_rows, keep, share, call.value_width}, scratch.prefetch);
        }
    }
}

template <class T>
void forward(const Call<T>& call, const Forward<T>& result) {
    if (call.batch * call.heads == 0) return;
    check_indices(call);
    prefer_large_pages(result.out, call.batch * call.heads * call.n_queries * call.value_width * sizeof(T));
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
            for (int64_t g = 0; g < std::max<int64_t>(1, call.lists[h].n_groups); g += BLOCK)
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
            if (g + 1 < last) row.prefetch(call.lists[h], g + 1, scratch.prefetch, out);
            forward_group(row, h, g, out, its, scratch);
            scratch.prefetch.rest();
        }
    };
    const auto finish = [&](const Row<T>& row) {
        constexpr int W = Simd<T>::W;
        for (int64_t first = 0; first < call.n_queries; first += W) {
            const int64_t n = std::min<int64_t>(W, call.n_queries - first), at = row.number * call.n_queries + first;
            alignas(64) T base[W] = {}, mass[W] = {}, lse[W];
            for (int64_t i = 0; i < n; ++i) base[i] = state[2 * (at + i)], mass[i] = state[2 * (at + i) + 1];
            store(lse, load(base) * T(LN_2) + logarithm<T>(load(mass)));
            std::memcpy(result.lse + at, lse, n * sizeof(T));
            for (int64_t i = 0; i < n; ++i)
                if (mass[i] == T(0)) std::fill_n(result.out + (at + i) * call.value_width, call.value_width, T(0));
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
        const Finally done([&] {
            if (counts[task.list].fetch_sub(1, std::memory_order_acq_rel) == 1 && task.list == n_lists - 1) finish(row);
        });
        some(row, task.list, task.first, task.last);
    });
}
