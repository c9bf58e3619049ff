// A loop of cuLaunchKernel with arguments packed before: what a launch costs at the least.
#include <time.h>

typedef int (*launch_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

// Microseconds of one launch, over n of them; negative if the driver refuses.
double raw_launch(launch_t launch, void *function, unsigned threads, unsigned shared, void *stream,
                  void **values, int n) {
  double start = now();
  for (int i = 0; i < n; i++)
    if (launch(function, 1, 1, 1, threads, 1, 1, shared, stream, values, 0)) return -1;
  return (now() - start) / n;
}
