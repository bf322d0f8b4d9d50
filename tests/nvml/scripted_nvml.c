/* An NVML that plays a script: the real binding loads it in place of NVIDIA's library.
 *
 * Which question it answers: does a reader of NVML get the number right? A made-up
 * library that answers at once with a smooth value would pass every test the real one fails. So
 * this one has the real one's habits. Its sensors refresh every 100 ms, its power draw is the mean
 * of the last second, and its counter is the exact integral of the curve up to the last refresh,
 * which may take a while to read.
 *
 * Build: gcc -shared -fPIC -O2 -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 scripted_nvml.c -lm -lpthread
 *
 * The script is a text file named by the environment variable SCRIPTED_NVML, read by the first
 * nvmlInit and again by the first after a full shutdown. Without the variable nvmlInit says
 * NVML_ERROR_LIBRARY_NOT_FOUND, so that a process which loaded this library for one test sees no
 * NVIDIA driver in the next. One directive a line; '#' begins a comment line; times are seconds
 * since the epoch; CODE is a number of NVML's nvmlReturn_t.
 *
 *   epoch_ns N               time zero on CLOCK_MONOTONIC, so that processes share one; absent: now
 *   stand_at T               the clock stands still at T; absent: it runs
 *   driver TEXT              the driver's version
 *   nvml TEXT                NVML's version
 *   init_error CODE          nvmlInit fails with this
 *   gpu                      begins a GPU; the directives below concern it
 *   mig GI CI                begins a MIG instance of the last GPU, which thereby is in MIG mode; it
 *                            has a name, a uuid, memory and processes, and no sensor of its own,
 *                            unless it is given a curve of power: then it answers what it is asked
 *   name TEXT | uuid TEXT | pci TEXT
 *   curve NAME T V [T V]...  a line through these points, level before the first and after the
 *                            last; a T given twice is a jump. NAME is one of: power (W),
 *                            memory (bytes used), utilization and memory_utilization (percent),
 *                            clock and memory_clock (MHz), temperature (C); what GPM counts:
 *                            graphics, sm, occupancy, tensor, hmma, imma, dfma, dram (percent),
 *                            pcie_tx, pcie_rx, nvlink_tx, nvlink_rx (MiB/s)
 *   memory_total BYTES | power_limit W | compute_mode N | throttle MASK | persistence 0 or 1
 *   architecture N | brand N
 *   refresh_ms N             period of power, fields and counter; 0: continuous
 *   energy_start J           what the counter reads at the epoch; less before it, but not below 0
 *   reset_at T               the counter begins again from 0
 *   frozen_energy            the counter stands at energy_start
 *   fail QUERY CODE [FROM [UNTIL [TIMES]]]   QUERY fails with CODE, at most so many times;
 *                            "all": whatever is asked of this GPU
 *   cost QUERY SECONDS       QUERY takes this long
 *   process PID BYTES        a program that computes on it; PID "self" is the one that asks, and
 *                            BYTES -1 what NVML says where it does not know
 *   graphics PID             a program with a graphics context on it
 *   virtualization N         as NVML numbers the modes: 2 is a vGPU
 *   hang AT FOR              power, fields: a query made in AT to AT+FOR returns when FOR is over
 *
 * QUERY: handle name uuid pci power fields instant average energy memory utilization clock
 * temperature events throttle limit compute_mode persistence processes mig virtualization gpm
 * (gpm: taking a sample)
 *
 * scripted_nvml_stand_at(seconds) moves a clock that stands still, or stops one; NAN lets it run.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    LIBRARY_NOT_FOUND = 12,
    UNKNOWN = 999
};

enum { FI_MEMORY_TEMP = 82, FI_ENERGY = 83, FI_POWER_AVERAGE = 185, FI_POWER_INSTANT = 186 };
enum { FI_LIMIT_MIN = 187, FI_LIMIT_MAX = 188, FI_LIMIT_DEFAULT = 189, FI_LIMIT_CURRENT = 190 };
enum { TYPE_UINT = 1, TYPE_ULONGLONG = 3 };

#define MIN_LIMIT_W 200.0 /* an H200's lowest setting */

/* The GPU's number plus one, so that it outlives a re-read script; a MIG instance's from here on. */
typedef void *Handle;
#define FIRST_MIG 1000
typedef struct {
    double t, v;
} Point;

typedef struct {
    Point *points;
    int count;
} Curve;

typedef struct {
    char query[24];
    int code;
    double from, until, times;
} Fault;

typedef struct {
    char query[24];
    double seconds;
} Cost;

#define MAX_PROCESSES 8

enum {
    POWER, MEMORY, UTILIZATION, MEMORY_UTILIZATION, CLOCK, MEMORY_CLOCK, TEMPERATURE,
    GRAPHICS, SM, OCCUPANCY, TENSOR, HMMA, IMMA, DFMA, DRAM, PCIE_TX, PCIE_RX, NVLINK_TX, NVLINK_RX,
    CURVES
};
static const char *const CURVE_NAMES[CURVES] = {
    "power", "memory", "utilization", "memory_utilization", "clock", "memory_clock", "temperature",
    "graphics", "sm", "occupancy", "tensor", "hmma", "imma", "dfma", "dram",
    "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx"};

typedef struct {
    char name[96], uuid[96], pci[32];
    Curve curves[CURVES];
    double memory_total, power_limit, refresh_s, energy_start, reset_at, hang_at, hang_for;
    unsigned compute_mode, persistence, architecture, brand, virtualization;
    int board; /* of a MIG instance: the number of its GPU; else -1 */
    unsigned gpu_instance, compute_instance;
    unsigned long long throttle;
    int frozen_energy;
    Fault *faults;
    int fault_count;
    Cost *costs;
    int cost_count;
    struct {
        unsigned pid; /* 0: whoever asks */
        unsigned long long bytes;
    } processes[MAX_PROCESSES];
    int process_count, graphics_count;
    unsigned graphics[MAX_PROCESSES];
} Gpu;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int users; /* nvmlInit calls not yet shut down */
static Gpu *gpus; /* as NVML lists them */
static int gpu_count;
static Gpu *migs; /* and their instances, which it lists by GPU */
static int mig_count;
static Gpu *being_read;
static char driver[80], nvml_version[80];
static int64_t epoch_ns;
static int init_error;
static double standing_at = NAN;

/* ---- time ---- */

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static double now_s(void) {
    return isnan(standing_at) ? (double)(monotonic_ns() - epoch_ns) * 1e-9 : standing_at;
}

static void sleep_s(double seconds) {
    if (seconds <= 0) return;
    struct timespec left = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
    while (nanosleep(&left, &left) != 0) {
    }
}

void scripted_nvml_stand_at(double seconds) { standing_at = seconds; }

static double refreshed(const Gpu *gpu, double t) {
    if (gpu->refresh_s <= 0) return t;
    /* The nudge keeps a time that is a whole number of periods on the boundary: 0.3 / 0.1 < 3. */
    return floor(t / gpu->refresh_s + 1e-9) * gpu->refresh_s;
}

/* ---- curves ---- */

static double between(Point a, Point b, double t) {
    return a.v + (b.v - a.v) * (t - a.t) / (b.t - a.t);
}

static double value_at(const Curve *curve, double t) {
    if (curve->count == 0) return 0;
    if (t < curve->points[0].t) return curve->points[0].v;
    for (int i = curve->count - 1; i >= 0; i--) {
        if (curve->points[i].t > t) continue;
        if (i == curve->count - 1) return curve->points[i].v;
        return between(curve->points[i], curve->points[i + 1], t);
    }
    return 0;
}

/* The area of the trapezium over the part of [start, end] that lies between two points. */
static double area(Point a, Point b, double start, double end) {
    double low = fmax(a.t, start), high = fmin(b.t, end);
    if (high <= low) return 0;
    return (high - low) * (between(a, b, low) + between(a, b, high)) / 2;
}

static double integral(const Curve *curve, double start, double end) {
    if (curve->count == 0 || end <= start) return 0;
    Point first = curve->points[0], last = curve->points[curve->count - 1];
    double sum = 0;
    if (start < first.t) sum += (fmin(first.t, end) - start) * first.v;
    if (end > last.t) sum += (end - fmax(last.t, start)) * last.v;
    for (int i = 0; i + 1 < curve->count; i++) {
        sum += area(curve->points[i], curve->points[i + 1], start, end);
    }
    return sum;
}

static double curve_now(const Gpu *gpu, int which) {
    return value_at(&gpu->curves[which], now_s());
}

static double instant_w(const Gpu *gpu) {
    return value_at(&gpu->curves[POWER], refreshed(gpu, now_s()));
}

static double average_w(const Gpu *gpu) {
    double t = refreshed(gpu, now_s());
    return integral(&gpu->curves[POWER], t - 1, t);
}

static double energy_j(const Gpu *gpu) {
    double now = now_s(), t = refreshed(gpu, now);
    if (gpu->frozen_energy) return gpu->energy_start;
    if (now >= gpu->reset_at) return integral(&gpu->curves[POWER], gpu->reset_at, t);
    double since_epoch = integral(&gpu->curves[POWER], 0, t) - integral(&gpu->curves[POWER], t, 0);
    return fmax(0, gpu->energy_start + since_epoch);
}

static unsigned milli(double value) { return (unsigned)llround(value * 1000); }

/* ---- the script ---- */

static void *grown(void *items, int count, size_t size) {
    void *more = realloc(items, (size_t)(count + 1) * size);
    if (more == NULL) abort();
    memset((char *)more + (size_t)count * size, 0, size);
    return more;
}

static void discard(Gpu **list, int *count) {
    for (int i = 0; i < *count; i++) {
        for (int c = 0; c < CURVES; c++) free((*list)[i].curves[c].points);
        free((*list)[i].faults);
        free((*list)[i].costs);
    }
    free(*list);
    *list = NULL;
    *count = 0;
}

static void discard_script(void) {
    discard(&gpus, &gpu_count);
    discard(&migs, &mig_count);
    being_read = NULL;
}

static void begin(Gpu **list, int *count) {
    *list = grown(*list, *count, sizeof(Gpu));
    being_read = &(*list)[(*count)++];
    being_read->refresh_s = 0.1;
    being_read->reset_at = being_read->hang_at = INFINITY;
    being_read->board = -1;
}

static int begin_mig(const char *rest) {
    if (gpu_count == 0) return -1;
    begin(&migs, &mig_count);
    being_read->board = gpu_count - 1;
    return sscanf(rest, "%u %u", &being_read->gpu_instance, &being_read->compute_instance) == 2 ? 0
                                                                                                : -1;
}

static int read_curve(Gpu *gpu, const char *rest) {
    char name[24];
    int used = 0, which = 0;
    if (sscanf(rest, "%23s%n", name, &used) != 1) return -1;
    while (which < CURVES && strcmp(name, CURVE_NAMES[which]) != 0) which++;
    if (which == CURVES) return -1;
    Curve *curve = &gpu->curves[which];
    Point point;
    for (rest += used; sscanf(rest, "%lf %lf%n", &point.t, &point.v, &used) == 2; rest += used) {
        curve->points = grown(curve->points, curve->count, sizeof(Point));
        curve->points[curve->count++] = point;
    }
    return curve->count > 0 && rest[strspn(rest, " ")] == '\0' ? 0 : -1;
}

static int read_fault(Gpu *gpu, const char *rest) {
    Fault fault = {.from = -INFINITY, .until = INFINITY, .times = INFINITY};
    int read = sscanf(rest, "%23s %d %lf %lf %lf", fault.query, &fault.code, &fault.from,
                      &fault.until, &fault.times);
    if (read < 2) return -1;
    gpu->faults = grown(gpu->faults, gpu->fault_count, sizeof(Fault));
    gpu->faults[gpu->fault_count++] = fault;
    return 0;
}

static int read_cost(Gpu *gpu, const char *rest) {
    Cost cost;
    if (sscanf(rest, "%23s %lf", cost.query, &cost.seconds) != 2) return -1;
    gpu->costs = grown(gpu->costs, gpu->cost_count, sizeof(Cost));
    gpu->costs[gpu->cost_count++] = cost;
    return 0;
}

static int text(char *into, size_t size, const char *rest) {
    snprintf(into, size, "%s", rest);
    return *rest ? 0 : -1;
}

static int number(double *into, const char *rest) { return sscanf(rest, "%lf", into) == 1 ? 0 : -1; }

static int count(unsigned *into, const char *rest) { return sscanf(rest, "%u", into) == 1 ? 0 : -1; }

static int read_process(Gpu *gpu, const char *rest) {
    char pid[24];
    long long bytes;
    if (gpu->process_count == MAX_PROCESSES) return -1;
    if (sscanf(rest, "%23s %lld", pid, &bytes) != 2) return -1;
    gpu->processes[gpu->process_count].pid = (unsigned)strtoul(pid, NULL, 10);
    gpu->processes[gpu->process_count++].bytes = (unsigned long long)bytes; /* -1: NVML's "N/A" */
    return 0;
}

static int read_graphics(Gpu *gpu, const char *rest) {
    char pid[24];
    if (gpu->graphics_count == MAX_PROCESSES) return -1;
    if (sscanf(rest, "%23s", pid) != 1) return -1;
    gpu->graphics[gpu->graphics_count++] = (unsigned)strtoul(pid, NULL, 10);
    return 0;
}

static int read_gpu_line(Gpu *gpu, const char *key, const char *rest) {
#define IS(word) (strcmp(key, word) == 0)
    if (IS("name")) return text(gpu->name, sizeof gpu->name, rest);
    if (IS("uuid")) return text(gpu->uuid, sizeof gpu->uuid, rest);
    if (IS("pci")) return text(gpu->pci, sizeof gpu->pci, rest);
    if (IS("curve")) return read_curve(gpu, rest);
    if (IS("fail")) return read_fault(gpu, rest);
    if (IS("cost")) return read_cost(gpu, rest);
    if (IS("process")) return read_process(gpu, rest);
    if (IS("graphics")) return read_graphics(gpu, rest);
    if (IS("hang")) return sscanf(rest, "%lf %lf", &gpu->hang_at, &gpu->hang_for) == 2 ? 0 : -1;
    if (IS("memory_total")) return number(&gpu->memory_total, rest);
    if (IS("power_limit")) return number(&gpu->power_limit, rest);
    if (IS("energy_start")) return number(&gpu->energy_start, rest);
    if (IS("reset_at")) return number(&gpu->reset_at, rest);
    if (IS("frozen_energy")) return gpu->frozen_energy = 1, 0;
    if (IS("compute_mode")) return count(&gpu->compute_mode, rest);
    if (IS("persistence")) return count(&gpu->persistence, rest);
    if (IS("architecture")) return count(&gpu->architecture, rest);
    if (IS("brand")) return count(&gpu->brand, rest);
    if (IS("virtualization")) return count(&gpu->virtualization, rest);
    if (IS("throttle")) return sscanf(rest, "%llu", &gpu->throttle) == 1 ? 0 : -1;
    if (IS("refresh_ms")) {
        int bad = number(&gpu->refresh_s, rest);
        gpu->refresh_s /= 1000;
        return bad;
    }
    return -1;
}

static int read_line(char *line) {
    line[strcspn(line, "\n")] = '\0';
    line += strspn(line, " ");
    if (*line == '\0' || *line == '#') return 0;
    char *rest = line + strcspn(line, " ");
    if (*rest) *rest++ = '\0';
    const char *key = line;
    if (IS("gpu")) return begin(&gpus, &gpu_count), 0;
    if (IS("mig")) return begin_mig(rest);
    if (IS("stand_at")) return number(&standing_at, rest);
    if (IS("driver")) return text(driver, sizeof driver, rest);
    if (IS("nvml")) return text(nvml_version, sizeof nvml_version, rest);
    if (IS("init_error")) return sscanf(rest, "%d", &init_error) == 1 ? 0 : -1;
    if (IS("epoch_ns")) return sscanf(rest, "%ld", (long *)&epoch_ns) == 1 ? 0 : -1;
    return being_read ? read_gpu_line(being_read, key, rest) : -1;
#undef IS
}

static int read_script(void) {
    const char *path = getenv("SCRIPTED_NVML");
    if (path == NULL || *path == '\0') return LIBRARY_NOT_FOUND;
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        fprintf(stderr, "scripted NVML: cannot open %s\n", path);
        return UNKNOWN;
    }
    discard_script();
    init_error = SUCCESS;
    standing_at = NAN;
    epoch_ns = monotonic_ns();
    text(driver, sizeof driver, "580.159.03");
    text(nvml_version, sizeof nvml_version, "13.580.159.03");
    char *line = NULL;
    size_t size = 0;
    int bad = 0;
    for (int n = 1; !bad && getline(&line, &size, file) > 0; n++) {
        bad = read_line(line);
        if (bad) fprintf(stderr, "scripted NVML: %s, line %d: not understood: %s\n", path, n, line);
    }
    free(line);
    fclose(file);
    return bad ? UNKNOWN : init_error;
}

/* ---- entering a query ---- */

static int is_failing(const Gpu *gpu, const char *query) {
    double t = now_s();
    for (int i = 0; i < gpu->fault_count; i++) {
        Fault *fault = &gpu->faults[i];
        int meant = strcmp(fault->query, query) == 0 || strcmp(fault->query, "all") == 0;
        if (meant && t >= fault->from && t < fault->until && fault->times-- > 0) return fault->code;
    }
    return SUCCESS;
}

static int instances_of(const Gpu *gpu) {
    int found = 0;
    for (int i = 0; i < mig_count; i++) found += gpu == &gpus[migs[i].board];
    return found;
}

static int is_one_of(const char *query, const char *const *queries) {
    while (*queries && strcmp(query, *queries) != 0) queries++;
    return *queries != NULL;
}

/* Sensors are the board's: an instance has none, and of a board in MIG mode the load is not told. */
static int is_unsupported(const Gpu *gpu, const char *query) {
    static const char *const OF_AN_INSTANCE[] = {"handle", "name", "uuid", "memory", "processes", NULL};
    static const char *const NOT_IN_MIG_MODE[] = {"utilization", "gpm", NULL};
    int is_quiet = gpu->curves[POWER].count == 0; /* else a driver that answers with its board's */
    if (gpu->board >= 0) return is_quiet && !is_one_of(query, OF_AN_INSTANCE);
    return instances_of(gpu) && is_one_of(query, NOT_IN_MIG_MODE);
}

static Gpu *gpu_of(Handle handle) {
    intptr_t number = (intptr_t)handle;
    if (number >= FIRST_MIG) return number - FIRST_MIG < mig_count ? &migs[number - FIRST_MIG] : NULL;
    return number >= 1 && number <= gpu_count ? &gpus[number - 1] : NULL;
}

/* What a query does before it answers: takes its time, hangs, fails. Finds the GPU. */
static int enter(Handle handle, const char *query, Gpu **found) {
    if (users == 0) return UNINITIALIZED;
    Gpu *gpu = *found = gpu_of(handle);
    if (gpu == NULL) return INVALID_ARGUMENT;
    if (is_unsupported(gpu, query)) return NOT_SUPPORTED;
    for (int i = 0; i < gpu->cost_count; i++) {
        if (strcmp(gpu->costs[i].query, query) == 0) sleep_s(gpu->costs[i].seconds);
    }
    double hung_s = now_s() - gpu->hang_at;
    int is_power = strcmp(query, "power") == 0 || strcmp(query, "fields") == 0;
    if (is_power && hung_s >= 0 && hung_s < gpu->hang_for) sleep_s(gpu->hang_for - hung_s);
    return is_failing(gpu, query);
}

#define ENTER(query)                                   \
    Gpu *gpu = NULL;                                   \
    int failure = enter(device, query, &gpu);          \
    if (failure) return failure

/* ---- NVML: the library ---- */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    int result = users ? SUCCESS : read_script();
    if (result == SUCCESS) users++;
    pthread_mutex_unlock(&lock);
    return result;
}

int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    int result = users ? SUCCESS : UNINITIALIZED;
    if (users) users--;
    pthread_mutex_unlock(&lock);
    return result;
}

const char *nvmlErrorString(int code) {
    static const char *const TEXTS[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported",
        "Insufficient Permissions", "Already Initialized", "Not Found", "Insufficient Size",
        "Insufficient External Power", "Driver Not Loaded", "Timeout", "Interrupt Request Issue",
        "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM", "GPU is lost",
        "GPU requires restart", "The operating system has blocked the request.",
        "RM has detected an NVML/RM version mismatch."};
    int known = code >= 0 && code < (int)(sizeof TEXTS / sizeof TEXTS[0]);
    return known ? TEXTS[code] : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    if (users == 0) return UNINITIALIZED;
    snprintf(version, length, "%s", driver);
    return SUCCESS;
}

int nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    if (users == 0) return UNINITIALIZED;
    snprintf(version, length, "%s", nvml_version);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    if (users == 0) return UNINITIALIZED;
    *version = 13000;
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

/* ---- NVML: finding a GPU ---- */

int nvmlDeviceGetCount_v2(unsigned *result) {
    if (users == 0) return UNINITIALIZED;
    *result = (unsigned)gpu_count;
    return SUCCESS;
}

int nvmlDeviceGetCount(unsigned *result) { return nvmlDeviceGetCount_v2(result); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *result) {
    Handle device = (Handle)((intptr_t)index + 1);
    ENTER("handle");
    *result = device;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex(unsigned index, Handle *result) {
    return nvmlDeviceGetHandleByIndex_v2(index, result);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *result) {
    if (users == 0) return UNINITIALIZED;
    for (int i = 0; i < gpu_count; i++) {
        if (strcmp(gpus[i].uuid, uuid) == 0) return nvmlDeviceGetHandleByIndex_v2(i, result);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Handle *result) {
    if (users == 0) return UNINITIALIZED;
    for (int i = 0; i < gpu_count; i++) {
        if (strcasecmp(gpus[i].pci, bus_id) == 0) return nvmlDeviceGetHandleByIndex_v2(i, result);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId(const char *bus_id, Handle *result) {
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, result);
}

int nvmlDeviceGetIndex(Handle device, unsigned *index) {
    ENTER("handle");
    *index = (unsigned)(gpu - (gpu->board < 0 ? gpus : migs));
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(Handle device, unsigned *minor) {
    return nvmlDeviceGetIndex(device, minor);
}

/* ---- NVML: what a GPU is ---- */

int nvmlDeviceGetName(Handle device, char *name, unsigned length) {
    ENTER("name");
    snprintf(name, length, "%s", gpu->name);
    return SUCCESS;
}

int nvmlDeviceGetUUID(Handle device, char *uuid, unsigned length) {
    ENTER("uuid");
    snprintf(uuid, length, "%s", gpu->uuid);
    return SUCCESS;
}

typedef struct {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} PciInfo;

int nvmlDeviceGetPciInfo_v3(Handle device, PciInfo *info) {
    ENTER("pci");
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "%s", gpu->pci);
    sscanf(gpu->pci, "%x:%x:%x", &info->domain, &info->bus, &info->device);
    snprintf(info->legacy_bus_id, sizeof info->legacy_bus_id, "%04X:%02X:%02X.0",
             info->domain & 0xffff, info->bus & 0xff, info->device & 0xff);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v2(Handle device, PciInfo *info) {
    return nvmlDeviceGetPciInfo_v3(device, info);
}

int nvmlDeviceGetBrand(Handle device, unsigned *brand) {
    ENTER("name");
    *brand = gpu->brand;
    return SUCCESS;
}

int nvmlDeviceGetArchitecture(Handle device, unsigned *architecture) {
    ENTER("name");
    *architecture = gpu->architecture;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(Handle device, int *major, int *minor) {
    ENTER("name");
    *major = (int)gpu->architecture; /* true of Hopper: NVML's 9 is compute capability 9.0 */
    *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetComputeMode(Handle device, unsigned *mode) {
    ENTER("compute_mode");
    *mode = gpu->compute_mode;
    return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(Handle device, unsigned *mode) {
    ENTER("persistence");
    *mode = gpu->persistence;
    return SUCCESS;
}

int nvmlDeviceGetVirtualizationMode(Handle device, unsigned *mode) {
    ENTER("virtualization");
    *mode = gpu->virtualization;
    return SUCCESS;
}

/* ---- NVML: MIG instances ---- */

int nvmlDeviceGetMigMode(Handle device, unsigned *current, unsigned *pending) {
    ENTER("mig");
    *current = *pending = instances_of(gpu) > 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Handle device, unsigned *result) {
    ENTER("mig");
    *result = instances_of(gpu) ? 7 : 0;
    return SUCCESS;
}

/* As the real one: an index is a place on the board, of which not each need be taken. */
int nvmlDeviceGetMigDeviceHandleByIndex(Handle device, unsigned index, Handle *result) {
    ENTER("mig");
    for (int i = 0; i < mig_count; i++) {
        if (&gpus[migs[i].board] != gpu || index-- > 0) continue;
        *result = (Handle)((intptr_t)i + FIRST_MIG);
        return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle device, Handle *result) {
    ENTER("handle");
    if (gpu->board < 0) return INVALID_ARGUMENT;
    *result = (Handle)((intptr_t)gpu->board + 1);
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(Handle device, unsigned *is_instance) {
    ENTER("handle");
    *is_instance = gpu->board >= 0;
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(Handle device, unsigned *id) {
    ENTER("handle");
    *id = gpu->gpu_instance;
    return gpu->board >= 0 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeInstanceId(Handle device, unsigned *id) {
    ENTER("handle");
    *id = gpu->compute_instance;
    return gpu->board >= 0 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetC2cModeInfoV(Handle device, void *info) {
    (void)info;
    ENTER("name");
    return NOT_SUPPORTED; /* as an H200 says: only Grace has such a link */
}

/* ---- NVML: power and energy ---- */

int nvmlDeviceGetPowerUsage(Handle device, unsigned *milliwatts) {
    ENTER("power");
    *milliwatts = milli(average_w(gpu));
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(Handle device, unsigned long long *millijoules) {
    ENTER("energy");
    *millijoules = (unsigned long long)llround(energy_j(gpu) * 1000);
    return SUCCESS;
}

static int limit_mw(Handle device, unsigned *milliwatts) {
    ENTER("limit");
    *milliwatts = milli(gpu->power_limit);
    return SUCCESS;
}

int nvmlDeviceGetPowerManagementLimit(Handle device, unsigned *milliwatts) {
    return limit_mw(device, milliwatts);
}

int nvmlDeviceGetPowerManagementDefaultLimit(Handle device, unsigned *milliwatts) {
    return limit_mw(device, milliwatts);
}

int nvmlDeviceGetEnforcedPowerLimit(Handle device, unsigned *milliwatts) {
    return limit_mw(device, milliwatts);
}

int nvmlDeviceGetPowerManagementLimitConstraints(Handle device, unsigned *low, unsigned *high) {
    ENTER("limit");
    *low = milli(fmin(MIN_LIMIT_W, gpu->power_limit));
    *high = milli(gpu->power_limit);
    return SUCCESS;
}

int nvmlDeviceGetPowerManagementMode(Handle device, unsigned *mode) {
    ENTER("limit");
    *mode = 1;
    return SUCCESS;
}

typedef struct {
    unsigned field, scope;
    long long timestamp_us, latency_us;
    unsigned type, result;
    union {
        double d;
        unsigned u;
        unsigned long long ull;
    } value;
} FieldValue;

static int field_mw(const Gpu *gpu, FieldValue *value, const char *query, double watts) {
    value->type = TYPE_UINT;
    value->value.u = milli(watts);
    return is_failing(gpu, query);
}

static int fill_field(const Gpu *gpu, FieldValue *value) {
    switch (value->field) {
        case FI_POWER_INSTANT: return field_mw(gpu, value, "instant", instant_w(gpu));
        case FI_POWER_AVERAGE: return field_mw(gpu, value, "average", average_w(gpu));
        case FI_LIMIT_MIN:
            return field_mw(gpu, value, "limit", fmin(MIN_LIMIT_W, gpu->power_limit));
        case FI_LIMIT_MAX:
        case FI_LIMIT_DEFAULT:
        case FI_LIMIT_CURRENT: return field_mw(gpu, value, "limit", gpu->power_limit);
        case FI_ENERGY:
            value->type = TYPE_ULONGLONG;
            value->value.ull = (unsigned long long)llround(energy_j(gpu) * 1000);
            return is_failing(gpu, "energy");
        case FI_MEMORY_TEMP:
            value->type = TYPE_UINT;
            value->value.u = (unsigned)lround(curve_now(gpu, TEMPERATURE));
            return is_failing(gpu, "temperature");
        default: return NOT_SUPPORTED;
    }
}

int nvmlDeviceGetFieldValues(Handle device, int count, FieldValue *values) {
    ENTER("fields");
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    for (int i = 0; i < count; i++) {
        values[i].timestamp_us = (long long)wall.tv_sec * 1000000 + wall.tv_nsec / 1000;
        values[i].latency_us = 0;
        /* Scopes other than the GPU's own (module, memory) exist on Grace parts only. */
        values[i].result = values[i].scope ? NOT_SUPPORTED : (unsigned)fill_field(gpu, &values[i]);
    }
    return SUCCESS;
}

/* ---- NVML: memory, load, clocks, heat ---- */

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;

int nvmlDeviceGetMemoryInfo(Handle device, Memory *memory) {
    ENTER("memory");
    memory->total = (unsigned long long)gpu->memory_total;
    memory->used = (unsigned long long)llround(curve_now(gpu, MEMORY));
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(Handle device, MemoryV2 *memory) {
    Memory plain;
    int failure = nvmlDeviceGetMemoryInfo(device, &plain);
    if (failure) return failure;
    memory->total = plain.total;
    memory->used = plain.used;
    memory->free = plain.free;
    memory->reserved = 0;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Handle device, unsigned rates[2]) {
    ENTER("utilization");
    rates[0] = (unsigned)lround(curve_now(gpu, UTILIZATION));
    rates[1] = (unsigned)lround(curve_now(gpu, MEMORY_UTILIZATION));
    return SUCCESS;
}

enum { CLOCK_MEM = 2 };

int nvmlDeviceGetClockInfo(Handle device, unsigned type, unsigned *mhz) {
    ENTER("clock");
    *mhz = (unsigned)lround(curve_now(gpu, type == CLOCK_MEM ? MEMORY_CLOCK : CLOCK));
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(Handle device, unsigned type, unsigned *mhz) {
    return nvmlDeviceGetClockInfo(device, type, mhz);
}

int nvmlDeviceGetTemperature(Handle device, unsigned sensor, unsigned *celsius) {
    (void)sensor;
    ENTER("temperature");
    *celsius = (unsigned)lround(curve_now(gpu, TEMPERATURE));
    return SUCCESS;
}

typedef struct {
    unsigned version, sensor;
    int celsius;
} TemperatureV1;

int nvmlDeviceGetTemperatureV(Handle device, TemperatureV1 *temperature) {
    return nvmlDeviceGetTemperature(device, temperature->sensor, (unsigned *)&temperature->celsius);
}

int nvmlDeviceGetCurrentClocksEventReasons(Handle device, unsigned long long *reasons) {
    ENTER("events");
    *reasons = gpu->throttle;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Handle device, unsigned long long *reasons) {
    ENTER("throttle");
    *reasons = gpu->throttle;
    return SUCCESS;
}

/* ---- NVML: GPM, which counts between two samples ---- */

enum { ARCHITECTURE_HOPPER = 9 };

typedef struct {
    Handle device;
    double t;
} GpmSample;

typedef struct {
    unsigned id, result;
    double value;
    const char *short_name, *long_name, *unit;
} GpmMetric;

typedef struct {
    unsigned version, count;
    GpmSample *earlier, *later;
    GpmMetric metrics[]; /* as many as this NVML knows; the caller's own count of them may differ */
} GpmMetrics;

static const struct {
    unsigned id;
    int curve;
} GPM_METRICS[] = {{1, GRAPHICS}, {2, SM},    {3, OCCUPANCY}, {5, TENSOR},   {6, DFMA},
                   {7, HMMA},     {9, IMMA},  {10, DRAM},     {20, PCIE_TX}, {21, PCIE_RX},
                   {60, NVLINK_RX}, {61, NVLINK_TX}};

int nvmlGpmQueryDeviceSupport(Handle device, unsigned support[2]) {
    ENTER("name");
    support[1] = gpu->architecture >= ARCHITECTURE_HOPPER;
    return SUCCESS;
}

int nvmlGpmSampleAlloc(GpmSample **sample) {
    if (users == 0) return UNINITIALIZED;
    *sample = calloc(1, sizeof **sample);
    return SUCCESS;
}

int nvmlGpmSampleFree(GpmSample *sample) {
    free(sample);
    return SUCCESS;
}

int nvmlGpmSampleGet(Handle device, GpmSample *sample) {
    ENTER("gpm");
    if (gpu->architecture < ARCHITECTURE_HOPPER) return NOT_SUPPORTED;
    *sample = (GpmSample){device, now_s()};
    return SUCCESS;
}

static int fill_metric(const GpmMetrics *wanted, GpmMetric *metric) {
    const Gpu *gpu = gpu_of(wanted->earlier->device);
    double start = wanted->earlier->t, end = wanted->later->t;
    for (size_t i = 0; i < sizeof GPM_METRICS / sizeof GPM_METRICS[0]; i++) {
        if (GPM_METRICS[i].id != metric->id) continue;
        const Curve *curve = &gpu->curves[GPM_METRICS[i].curve];
        if (curve->count == 0) return NOT_SUPPORTED;
        metric->value = end > start ? integral(curve, start, end) / (end - start) : value_at(curve, end);
        return SUCCESS;
    }
    return NOT_SUPPORTED;
}

int nvmlGpmMetricsGet(GpmMetrics *wanted) {
    if (users == 0) return UNINITIALIZED;
    if (wanted->earlier->device != wanted->later->device) return INVALID_ARGUMENT;
    if (wanted->later->t < wanted->earlier->t) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < wanted->count; i++) {
        wanted->metrics[i].result = (unsigned)fill_metric(wanted, &wanted->metrics[i]);
    }
    return SUCCESS;
}

/* ---- NVML: processes; settings, which need root ---- */

typedef struct {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
} ProcessInfo; /* of the second and third version alike */

static int list_processes(Handle device, unsigned *count, ProcessInfo *processes) {
    ENTER("processes");
    unsigned room = *count, wanted = (unsigned)gpu->process_count;
    *count = wanted;
    if (room < wanted || (wanted && !processes)) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < wanted; i++) {
        unsigned pid = gpu->processes[i].pid;
        processes[i] = (ProcessInfo){pid ? pid : (unsigned)getpid(), gpu->processes[i].bytes, ~0u, ~0u};
    }
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Handle device, unsigned *count, ProcessInfo *processes) {
    return list_processes(device, count, processes);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned *count, ProcessInfo *processes) {
    return list_processes(device, count, processes);
}

static int no_processes(Handle device, unsigned *count) {
    ENTER("processes");
    *count = 0;
    return SUCCESS;
}

#define PROCESS_LIST(function)                                            \
    int function(Handle device, unsigned *count, void *processes) {       \
        (void)processes;                                                  \
        return no_processes(device, count);                               \
    }
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2)

int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle device, unsigned *count, ProcessInfo *processes) {
    ENTER("processes");
    unsigned room = *count, wanted = (unsigned)gpu->graphics_count;
    *count = wanted;
    if (room < wanted || (wanted && !processes)) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < wanted; i++) {
        unsigned pid = gpu->graphics[i];
        processes[i] = (ProcessInfo){pid ? pid : (unsigned)getpid(), 1 << 20, ~0u, ~0u};
    }
    return SUCCESS;
}

int nvmlDeviceSetPowerManagementLimit(Handle device, unsigned milliwatts) {
    (void)milliwatts;
    ENTER("limit");
    return NO_PERMISSION;
}

int nvmlDeviceSetPersistenceMode(Handle device, unsigned mode) {
    (void)mode;
    ENTER("persistence");
    return NO_PERMISSION;
}
