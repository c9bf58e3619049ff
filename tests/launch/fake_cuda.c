// A driver without a GPU: it loads anything, and writes down what it is asked to launch.
#include <stdint.h>
#include <string.h>

typedef struct { uint32_t grid[3], block[3], shared; void *stream; const uint8_t *attributes; uint32_t count; } Config;
typedef struct { uint32_t grid[3], block[3], shared, count; uint64_t stream, function; uint8_t attributes[4 * 72]; uint32_t bytes, n; uint8_t values[4096]; } Record;

static __thread void *current;
static uint32_t sizes[4096][256], counts[4096];
static uint64_t functions = 1;
Record fake_records[4096];
volatile uint32_t fake_launches, fake_encodes, fake_binds;
uint32_t fake_status;

int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 75: *value = 9; break;          // compute capability
    case 76: *value = 0; break;
    case 97: *value = 232448; break;     // shared memory of a block
    case 8: *value = 49152; break;
    case 81: *value = 233472; break;
    case 16: *value = 132; break;
    default: *value = 64;
  }
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(uintptr_t)(100 + device); return 0; }
int cuCtxSetCurrent(void *context) { current = context; fake_binds++; return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)(uintptr_t)functions++; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) { *value = pointer; return 0; }
int cuCtxGetLimit(uint64_t *value, int limit) { *value = 0; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuTensorMapEncodeIm2col(void) { return 1; }
int cuCtxSetLimit(int limit, uint64_t value) { return 0; }
int cuOccupancyMaxActiveClusters(int *n, void *function, const void *config) { *n = 1; return 0; }
int cuGetErrorString(int status, const char **text) {
  *text = status == 201 ? "invalid device context" : status == 1 ? "invalid argument" : "a made-up error";
  return 0;
}

void fake_define(uint64_t function, uint32_t n, const uint32_t *bytes) {
  counts[function] = n;
  memcpy(sizes[function], bytes, 4 * n);
}

int cuLaunchKernelEx(const Config *config, void *function, void **values, void **extra) {
  if (!current) return 201;
  if (fake_status) return fake_status;
  uint32_t at = __sync_fetch_and_add(&fake_launches, 1) % 4096;
  uint64_t f = (uint64_t)function;
  Record *r = &fake_records[at];
  memset(r, 0, sizeof *r);
  memcpy(r->grid, config->grid, 28);
  r->stream = (uint64_t)config->stream;
  r->function = f;
  r->count = config->count;
  if (config->count) memcpy(r->attributes, config->attributes, 72 * config->count);
  r->n = counts[f];
  for (uint32_t i = 0; i < counts[f]; i++) {
    memcpy(r->values + r->bytes, values[i], sizes[f][i]);
    r->bytes += sizes[f][i];
  }
  return 0;
}

// Not the hardware's format: every argument, so that two descriptors are equal where all is.
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *shape,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                           int interleave, int swizzle, int promotion, int fill) {
  uint64_t words[16] = {0};
  if (rank < 1 || rank > 5 || (uintptr_t)map % 64 || (uintptr_t)address % 16) return 1;
  words[0] = (uint64_t)address;
  words[1] = type | rank << 8 | interleave << 16 | (uint64_t)swizzle << 24 | (uint64_t)promotion << 32 | (uint64_t)fill << 40;
  for (uint32_t i = 0; i < rank; i++) {
    words[2 + i] = shape[i];
    if (i + 1 < rank) words[7 + i] = strides[i];
    words[11 + i] = (uint64_t)box[i] << 32 | steps[i];
  }
  memcpy(map, words, 128);
  __sync_fetch_and_add(&fake_encodes, 1);
  return 0;
}

int cuLaunchKernel(void *function, uint32_t x, uint32_t y, uint32_t z, uint32_t bx, uint32_t by, uint32_t bz,
                   uint32_t shared, void *stream, void **values, void **extra) {
  Config config = {{x, y, z}, {bx, by, bz}, shared, stream, 0, 0};
  return cuLaunchKernelEx(&config, function, values, extra);
}
