// The team of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "isa.h"

namespace smyrf::SMYRF_ISA {

// Runs `work` at the end of a block, also when the block throws.
template <class Work>
class Finally {
   public:
    explicit Finally(const Work& work) : work_(work) {}
    ~Finally() { work_(); }

   private:
    Work work_;
};

// Runs work(0) … work(n_tasks − 1) on up to `threads` threads.
//
// Tasks are handed out in ascending order, and a task that was handed out runs to its end. So a task may wait for tasks
// with smaller numbers, and only for these: the smallest task that has not ended waits for none, and the team cannot
// deadlock, whatever its size. `attend_forward` depends on it. If tasks throw, all others still run, because some may
// wait for them, and one of the exceptions is thrown at the end; the work of a task that others wait for must be marked
// as done by `Finally`.
template <class Work>
void run(int64_t n_tasks, int threads, const Work& work) {
    const int team = static_cast<int>(std::min<int64_t>(threads, n_tasks));
    if (team <= 1) {
        for (int64_t task = 0; task < n_tasks; ++task) work(task);
        return;
    }
    std::atomic<int64_t> next{0};
    std::exception_ptr thrown;
#pragma omp parallel num_threads(team)
    for (int64_t task = next++; task < n_tasks; task = next++) {
        try {
            work(task);
        } catch (...) {
#pragma omp critical(smyrf_thrown)
            thrown = std::current_exception();
        }
    }
    if (thrown) std::rethrow_exception(thrown);
}

}  // namespace smyrf::SMYRF_ISA
