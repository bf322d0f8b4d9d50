/* A libamd_smi.so that reads its answers from a file: AMD's own Python binding loads it.
 *
 * Which question it answers: does a reader of amdsmi get the number right? The structures below are
 * laid out as the binding of amdsmi 7.0 has them, and what is not in the file answers as the real
 * library does for a GPU that lacks it: all bits set. The binding looks up every function that
 * AMD's library has; those that are not written here are added when this is compiled, and say "not
 * supported".
 *
 * The file is named by SCRIPTED_AMDSMI and read anew at each call, so a test moves time by writing
 * it again. A line is GPU KEY VALUE; GPU * is the machine. GPU KEY! CODE makes a query fail with a
 * code of amdsmi_status_t.
 *
 *   * init!, * gpus N
 *   name uuid serial bdf hip partition driver cap (uW) pids (in one word, with commas)
 *   current average (W)  energy (steps)  resolution (uJ)  used total (bytes)  activity (percent)
 *   clock (MHz)  hotspot (C)  ppt prochot socket_thm vr_thm hbm_thm (counts)
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 2, INIT_ERROR = 18 };

typedef void *Handle; /* the GPU's number plus one; of a socket too: each has one GPU */

static int found(const char *gpu, const char *key, char *value) {
    const char *path = getenv("SCRIPTED_AMDSMI");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[400], whose[32], what[64], text[256];
    int hit = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%31s %63s %255[^\n]", whose, what, text) == 3 &&
            strcmp(whose, gpu) == 0 && strcmp(what, key) == 0) {
            strcpy(value, text);
            hit = 1;
        }
    }
    if (file) fclose(file);
    return hit;
}

static int of(Handle gpu, const char *key, char *value) {
    char whose[32];
    snprintf(whose, sizeof whose, "%ld", (long)((intptr_t)gpu - 1));
    return found(whose, key, value);
}

static uint64_t number(Handle gpu, const char *key) {
    char text[256];
    return of(gpu, key, text) ? strtoull(text, NULL, 10) : UINT64_MAX;
}

static void words(Handle gpu, const char *key, char *text, size_t room) {
    char value[256];
    snprintf(text, room, "%s", of(gpu, key, value) ? value : "");
}

static int failure(Handle gpu, const char *query) {
    char text[256];
    return of(gpu, query, text) ? atoi(text) : SUCCESS;
}

#define FAIL(query)                          \
    do {                                     \
        int code = failure(gpu, query "!");  \
        if (code) return code;               \
    } while (0)

/* ---- the machine ---- */

int amdsmi_init(uint64_t flags) {
    char text[256];
    (void)flags;
    if (!getenv("SCRIPTED_AMDSMI")) return INIT_ERROR;
    return found("*", "init!", text) ? atoi(text) : SUCCESS;
}

int amdsmi_shut_down(void) { return SUCCESS; }

static uint32_t gpu_count(void) {
    char text[256];
    return found("*", "gpus", text) ? (uint32_t)atoi(text) : 0;
}

int amdsmi_get_socket_handles(uint32_t *count, Handle *sockets) {
    *count = gpu_count();
    for (uint32_t i = 0; sockets && i < *count; i++) sockets[i] = (Handle)(intptr_t)(i + 1);
    return SUCCESS;
}

int amdsmi_get_processor_handles(Handle socket, uint32_t *count, Handle *gpus) {
    *count = 1;
    if (gpus) gpus[0] = socket;
    return SUCCESS;
}

/* ---- what a GPU is ---- */

typedef struct {
    char market_name[256];
    uint32_t vendor_id;
    char vendor_name[256];
    uint32_t subvendor_id;
    uint64_t device_id;
    uint32_t rev_id;
    char asic_serial[256];
    uint32_t oam_id, compute_units;
    uint64_t target_graphics_version;
    uint32_t subsystem_id, reserved[21];
} AsicInfo;

int amdsmi_get_gpu_asic_info(Handle gpu, AsicInfo *info) {
    FAIL("name");
    memset(info, 0, sizeof *info);
    info->vendor_id = 0x1002;
    words(gpu, "name", info->market_name, sizeof info->market_name);
    words(gpu, "serial", info->asic_serial, sizeof info->asic_serial);
    return SUCCESS;
}

int amdsmi_get_gpu_device_uuid(Handle gpu, uint32_t *length, char *uuid) {
    FAIL("uuid");
    words(gpu, "uuid", uuid, *length);
    return SUCCESS;
}

int amdsmi_get_gpu_device_bdf(Handle gpu, uint64_t *bdf) {
    char text[256];
    unsigned domain, bus, device, function;
    FAIL("bdf");
    if (!of(gpu, "bdf", text) ||
        sscanf(text, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4)
        return NOT_SUPPORTED;
    *bdf = function | device << 3 | bus << 8 | (uint64_t)domain << 16;
    return SUCCESS;
}

typedef struct {
    uint32_t drm_render, drm_card, hsa_id, hip_id;
    char hip_uuid[256];
} Enumeration;

int amdsmi_get_gpu_enumeration_info(Handle gpu, Enumeration *info) {
    memset(info, 0, sizeof *info);
    info->hip_id = (uint32_t)number(gpu, "hip");
    return SUCCESS;
}

int amdsmi_get_gpu_compute_partition(Handle gpu, char *partition, uint32_t length) {
    char text[256];
    if (!of(gpu, "partition", text)) return NOT_SUPPORTED;
    snprintf(partition, length, "%s", text);
    return SUCCESS;
}

typedef struct {
    char version[256], date[256], name[256];
} DriverInfo;

int amdsmi_get_gpu_driver_info(Handle gpu, DriverInfo *info) {
    memset(info, 0, sizeof *info);
    words(gpu, "driver", info->version, sizeof info->version);
    return SUCCESS;
}

typedef struct {
    uint64_t power_cap, default_cap, dpm_cap, min_cap, max_cap, reserved[3];
} PowerCap;

int amdsmi_get_power_cap_info(Handle gpu, uint32_t sensor, PowerCap *cap) {
    (void)sensor;
    FAIL("cap");
    memset(cap, 0, sizeof *cap);
    cap->power_cap = number(gpu, "cap");
    return SUCCESS;
}

/* ---- power and energy ---- */

typedef struct {
    uint64_t socket_power;
    uint32_t current, average;
    uint64_t gfx_voltage, soc_voltage, mem_voltage;
    uint32_t limit;
    uint64_t reserved[18];
} PowerInfo;

int amdsmi_get_power_info(Handle gpu, PowerInfo *power) {
    uint64_t current = number(gpu, "current"), average = number(gpu, "average");
    FAIL("power");
    memset(power, 0xff, sizeof *power);
    /* What a GPU lacks is 16 bits wide in the firmware's table, and stays so. */
    power->current = current == UINT64_MAX ? 0xffff : (uint32_t)current;
    power->average = average == UINT64_MAX ? 0xffff : (uint32_t)average;
    power->socket_power = current == UINT64_MAX ? power->average : power->current;
    return SUCCESS;
}

int amdsmi_get_energy_count(Handle gpu, uint64_t *steps, float *resolution, uint64_t *t) {
    char text[256];
    FAIL("energy");
    *steps = number(gpu, "energy");
    *resolution = of(gpu, "resolution", text) ? strtof(text, NULL) : 15.3f;
    *t = 0;
    return SUCCESS;
}

/* ---- memory, load, clocks, heat ---- */

int amdsmi_get_gpu_memory_usage(Handle gpu, uint32_t type, uint64_t *bytes) {
    FAIL("used");
    *bytes = type == 0 ? number(gpu, "used") : 0;
    return SUCCESS;
}

int amdsmi_get_gpu_memory_total(Handle gpu, uint32_t type, uint64_t *bytes) {
    FAIL("total");
    *bytes = type == 0 ? number(gpu, "total") : 0;
    return SUCCESS;
}

int amdsmi_get_gpu_activity(Handle gpu, uint32_t usage[16]) {
    uint64_t activity = number(gpu, "activity");
    FAIL("activity");
    memset(usage, 0, 16 * sizeof *usage);
    usage[0] = activity == UINT64_MAX ? 0xffff : (uint32_t)activity;
    return SUCCESS;
}

typedef struct {
    uint32_t clock, min, max;
    uint8_t locked, deep_sleep;
    uint32_t reserved[4];
} ClockInfo;

int amdsmi_get_clock_info(Handle gpu, uint32_t type, ClockInfo *clock) {
    FAIL("clock");
    memset(clock, 0, sizeof *clock);
    clock->clock = type == 0 ? (uint32_t)number(gpu, "clock") : 0;
    return SUCCESS;
}

int amdsmi_get_temp_metric(Handle gpu, uint32_t sensor, uint32_t metric, int64_t *celsius) {
    FAIL("hotspot");
    if (sensor != 1 || metric != 0 || number(gpu, "hotspot") == UINT64_MAX) return NOT_SUPPORTED;
    *celsius = (int64_t)number(gpu, "hotspot");
    return SUCCESS;
}

/* The firmware's table: its size, and where its counts begin, come from the binding. */
int amdsmi_get_gpu_metrics_info(Handle gpu, uint8_t *table) {
    static const char *const names[] = {"prochot", "ppt", "socket_thm", "vr_thm", "hbm_thm"};
    FAIL("metrics");
    memset(table, 0xff, METRICS_BYTES);
    for (int i = 0; i < 5; i++) {
        uint64_t count = number(gpu, names[i]);
        memcpy(table + METRICS_COUNTER_AT + 8 * (i + 1), &count, sizeof count);
    }
    return SUCCESS;
}

/* ---- processes ---- */

typedef struct {
    char name[256];
    uint32_t pid;
    uint64_t mem, engines[2];
    uint32_t engines_reserved[12];
    uint64_t memory[3];
    uint32_t memory_reserved[10];
    char container_name[256];
    uint32_t cu_occupancy, reserved[11];
} Process;

int amdsmi_get_gpu_process_list(Handle gpu, uint32_t *count, Process *list) {
    char text[256];
    uint32_t room = *count;
    FAIL("pids");
    *count = 0;
    if (!of(gpu, "pids", text)) return SUCCESS;
    for (char *word = strtok(text, ","); word && *count < room; word = strtok(NULL, ",")) {
        memset(&list[*count], 0, sizeof *list);
        list[(*count)++].pid = (uint32_t)atoi(word);
    }
    return SUCCESS;
}
