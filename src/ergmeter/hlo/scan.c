/* The compiled reader: indexes the computations of an HLO module and multiplies out plain dots.
 *
 * It judges nothing. Whatever is out of the ordinary (damage, groups, ids that occur twice, no
 * memory) makes it return NULL, and a dot that it can't resolve or that overflows is handed over as
 * a special instruction; protobuf then decides. Every read is checked against the end
 * of what holds it.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MODULE_NAME = 1, MODULE_ENTRY_NAME = 2, MODULE_COMPUTATION = 3, MODULE_ENTRY_ID = 6 };
enum { MODULE_PAYLOAD = 22, NAME = 1, INSTRUCTION = 2, COMPUTATION_ID = 5, ROOT_ID = 6 };
enum { OPCODE = 2, SHAPE = 3, DOT_DIMENSIONS = 30, ID = 35 };
enum { OPERAND_IDS = 36, CALLED_IDS = 38, MAX_DIMENSIONS = 32, MAX_PROBES = 512 };
enum kind { DOT, SPECIAL, APPLYING, QUIET, OTHER };

typedef struct { int64_t start, end; } span;
typedef struct { const uint8_t *data; int64_t at, end; } cursor;
typedef struct { uint32_t number; int wire; uint64_t value; span span; } field;
typedef struct { int64_t *items, count, room; } list;

typedef struct {
  span opcode, shape, numbers;
  int64_t id, operand, operands, called;
} line;

/* A row for each computation. Its parts of the lists begin where the row before it ends. */
enum row {
  ROW_ID, ROW_ROOT, ROW_NAME, ROW_NAME_END, ROW_COUNT, ROW_DOT_MACS, ROW_WORK,
  ROW_INSTRUCTIONS_END, ROW_SPECIAL_END, ROW_CALLS_END, ROW_APPLIED_END, ROW_TABLE, ROW_TABLE_SIZE,
  ROW
};

/* What Python sees: lists of instructions by their number in the computation (special), of callees
 * with the instruction that calls (calls), of callees (applied), and places: start and end of every
 * instruction. */
typedef struct {
  list rows, special, calls, applied, places, payloads;
  int64_t entry_id, name, name_end, entry_name, entry_name_end;
  const uint8_t *data;
  list ids, dots, tables;
} scan;

static int reserve(list *in, int64_t more) {
  int64_t room = in->room ? in->room : 64;
  if (in->room - in->count >= more) return 1;
  while (room - in->count < more) room *= 2;
  int64_t *items = realloc(in->items, (size_t)room * sizeof *items);
  if (!items) return 0;
  in->items = items;
  in->room = room;
  return 1;
}

static int push(list *to, int64_t item) {
  if (to->count == to->room && !reserve(to, 1)) return 0;
  to->items[to->count++] = item;
  return 1;
}

static int64_t as_signed(uint64_t value) {
  int64_t result;
  memcpy(&result, &value, sizeof result);
  return result;
}

static inline int varint(cursor *from, int most, uint64_t *value) {
  uint64_t result = 0;
  if (from->at < from->end && from->data[from->at] < 0x80) {
    *value = from->data[from->at++];
    return 1;
  }
  for (int i = 0; i < most; i++) {
    if (from->at >= from->end) return 0;
    uint8_t byte = from->data[from->at++];
    result |= (uint64_t)(byte & 0x7f) << (7 * i);
    if (byte < 0x80) {
      *value = result;
      return 1;
    }
  }
  return 0;
}

static inline int next_field(cursor *from, field *found) {
  uint64_t tag, size;
  if (!varint(from, 5, &tag) || tag > UINT32_MAX || tag < 8) return 0;
  found->number = (uint32_t)(tag >> 3);
  found->wire = (int)(tag & 7);
  switch (found->wire) {
  case 0:
    return varint(from, 10, &found->value);
  case 2:
    if (!varint(from, 5, &size) || size > INT32_MAX) return 0;
    break;
  case 1:
    size = 8;
    break;
  case 5:
    size = 4;
    break;
  default:
    return 0;
  }
  if ((int64_t)size > from->end - from->at) return 0;
  found->span.start = from->at;
  found->span.end = from->at += (int64_t)size;
  return 1;
}

/* The numbers of a repeated field, packed or not, one by one: 1 for each, 0 at the end, -1 if
 * there is something wrong. `rest` starts as integers_of. */
static int next_integer(cursor *rest, const field *in, int64_t *value) {
  uint64_t raw;
  if (rest->at >= rest->end) return 0;
  if (in->wire == 0) {
    raw = in->value;
    rest->at = rest->end;
  } else if (!varint(rest, 10, &raw)) {
    return -1;
  }
  *value = as_signed(raw);
  return 1;
}

static cursor integers_of(const uint8_t *data, const field *in) {
  if (in->wire == 2) return (cursor){data, in->span.start, in->span.end};
  return (cursor){data, 0, in->wire == 0};
}

/* Counts a field's numbers and keeps the first. */
static int integers(const uint8_t *data, const field *in, int64_t *count, int64_t *first) {
  cursor rest = integers_of(data, in);
  int64_t value;
  int more;
  while ((more = next_integer(&rest, in, &value)) > 0)
    if ((*count)++ == 0) *first = value;
  return more == 0;
}

static int read_line(const uint8_t *data, span where, line *found) {
  cursor at = {data, where.start, where.end};
  int64_t ignored;
  field in = {0};
  memset(found, 0, sizeof *found);
  while (at.at < at.end) {
    if (!next_field(&at, &in)) return 0;
    switch (in.number) {
    case OPCODE:
      if (in.wire == 2) found->opcode = in.span;
      break;
    case SHAPE:
      if (in.wire == 2) found->shape = in.span;
      break;
    case DOT_DIMENSIONS:
      if (in.wire == 2) found->numbers = in.span;
      break;
    case ID:
      if (in.wire == 0) found->id = as_signed(in.value);
      break;
    case OPERAND_IDS:
      if (!integers(data, &in, &found->operands, &found->operand)) return 0;
      break;
    case CALLED_IDS:
      if (!integers(data, &in, &found->called, &ignored)) return 0;
      break;
    default:
      break;
    }
  }
  return 1;
}

/* Appends the callees of an instruction, each with the instruction's number unless that is < 0. */
static int add_calls(const uint8_t *data, span where, list *to, int64_t number) {
  cursor at = {data, where.start, where.end};
  field in = {0};
  while (at.at < at.end) {
    if (!next_field(&at, &in)) return 0;
    if (in.number != CALLED_IDS) continue;
    cursor rest = integers_of(data, &in);
    int64_t callee;
    int more;
    while ((more = next_integer(&rest, &in, &callee)) > 0)
      if (!push(to, callee) || (number >= 0 && !push(to, number))) return 0;
    if (more < 0) return 0;
  }
  return 1;
}

/* The same lists as in module.py. */
static enum kind kind_of(const uint8_t *text, int64_t size, int calls) {
#define IS(word) (size == (int64_t)sizeof word - 1 && !memcmp(text, word, sizeof word - 1))
  if (IS("dot")) return DOT;
  if (IS("scaled-dot") || IS("convolution") || IS("ragged-dot") || IS("custom-call") ||
      IS("while") || IS("conditional") || IS("cholesky") || IS("triangular-solve") || IS("fft"))
    return SPECIAL;
  if (!calls) return QUIET;
  if (IS("map") || IS("reduce") || IS("reduce-window") || IS("scatter") ||
      IS("select-and-scatter") || IS("sort") || IS("all-reduce") || IS("all-reduce-start") ||
      IS("reduce-scatter"))
    return APPLYING;
  if (IS("parameter") || IS("constant") || IS("add") || IS("multiply") || IS("subtract") ||
      IS("divide") || IS("negate") || IS("broadcast") || IS("reshape") || IS("transpose") || IS("convert") ||
      IS("select") || IS("compare") || IS("exponential") || IS("log") || IS("rsqrt") ||
      IS("sqrt") || IS("power") || IS("tanh") || IS("maximum") || IS("minimum") || IS("and") ||
      IS("or") || IS("not") || IS("slice") || IS("concatenate") || IS("pad") || IS("iota") ||
      IS("tuple") || IS("get-tuple-element") || IS("copy") || IS("bitcast") ||
      IS("dynamic-slice") || IS("dynamic-update-slice") || IS("gather") || IS("reverse") ||
      IS("async-update") || IS("async-done"))
    return QUIET;
  return OTHER;
#undef IS
}

static int multiply(uint64_t *result, int64_t by) {
  return by >= 0 && !__builtin_mul_overflow(*result, (uint64_t)by, result) && *result <= INT64_MAX;
}

/* The numbers of field `number` in a message, at most MAX_DIMENSIONS of them. */
static int numbers_in(const uint8_t *data, span where, uint32_t number, int64_t *into, int *count) {
  cursor at = {data, where.start, where.end};
  field in = {0};
  *count = 0;
  while (at.at < at.end) {
    if (!next_field(&at, &in)) return 0;
    if (in.number != number) continue;
    cursor rest = integers_of(data, &in);
    int64_t value;
    int more;
    while ((more = next_integer(&rest, &in, &value)) > 0) {
      if (*count == MAX_DIMENSIONS) return 0;
      into[(*count)++] = value;
    }
    if (more < 0) return 0;
  }
  return 1;
}

static int dot_macs(const uint8_t *data, const line *dot, const line *left, int64_t *macs) {
  int64_t result[MAX_DIMENSIONS], sizes[MAX_DIMENSIONS], contracted[MAX_DIMENSIONS];
  int64_t type[MAX_DIMENSIONS];
  int results, dimensions, contractions, types;
  uint64_t product = 1;
  if (!numbers_in(data, dot->shape, 2, type, &types) ||
      !numbers_in(data, dot->shape, 3, result, &results) ||
      !numbers_in(data, left->shape, 3, sizes, &dimensions) ||
      !numbers_in(data, dot->numbers, 1, contracted, &contractions))
    return 0;
  /* PrimitiveType C64 and C128: counted by products.py, as four real products. */
  for (int i = 0; i < types; i++)
    if (type[i] == 15 || type[i] == 18) return 0;
  for (int i = 0; i < results; i++)
    if (!multiply(&product, result[i])) return 0;
  for (int i = 0; i < contractions; i++) {
    if (contracted[i] < 0 || contracted[i] >= dimensions) return 0;
    if (!multiply(&product, sizes[contracted[i]])) return 0;
  }
  *macs = (int64_t)product;
  return 1;
}

static uint64_t mixed(int64_t id) {
  uint64_t x = (uint64_t)id;
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

/* Looks an id up in a computation's table. Where it is not, *slot is where it would go, or -1. */
static int64_t find(const scan *in, const int64_t *row, int64_t id, int64_t *slot) {
  const int64_t *table = in->tables.items + row[ROW_TABLE];
  uint64_t mask = (uint64_t)row[ROW_TABLE_SIZE] - 1, at = mixed(id) & mask;
  for (int i = 0; i < MAX_PROBES; i++, at = (at + 1) & mask) {
    *slot = (int64_t)at;
    if (table[at] < 0 || in->ids.items[table[at]] == id) return table[at];
  }
  *slot = -1;
  return -1;
}

/* Makes a computation's table of ids, if it has none yet. */
static int build_table(scan *into, int64_t *row) {
  int64_t last = row[ROW_INSTRUCTIONS_END], first = last - row[ROW_COUNT], size = 2, slot;
  if (row[ROW_TABLE_SIZE]) return 1;
  while (size < row[ROW_COUNT] * 2) size *= 2;
  row[ROW_TABLE] = into->tables.count;
  if (!reserve(&into->tables, size)) return 0;
  memset(into->tables.items + into->tables.count, 0xff, (size_t)size * sizeof *into->tables.items);
  into->tables.count += size;
  row[ROW_TABLE_SIZE] = size;
  for (int64_t i = first; i < last; i++) {
    if (find(into, row, into->ids.items[i], &slot) >= 0 || slot < 0) {
      row[ROW_TABLE_SIZE] = 0;
      return 0;
    }
    into->tables.items[row[ROW_TABLE] + slot] = i;
  }
  return 1;
}

static span place_of(const scan *in, int64_t index) {
  const int64_t *at = in->places.items + 2 * index;
  return (span){at[0], at[1]};
}

static int add_instruction(scan *into, span where, int64_t *row) {
  const uint8_t *data = into->data;
  int64_t number = row[ROW_COUNT]++;
  line found;
  if (!read_line(data, where, &found) || !push(&into->ids, found.id) ||
      !push(&into->places, where.start) || !push(&into->places, where.end))
    return 0;
  int64_t size = found.opcode.end - found.opcode.start;
  switch (kind_of(data + found.opcode.start, size, found.called > 0)) {
  case DOT:
    return push(&into->dots, number);
  case SPECIAL:
    return push(&into->special, number);
  case APPLYING:
    return add_calls(data, where, &into->applied, -1);
  case OTHER:
    return add_calls(data, where, &into->calls, number);
  case QUIET:
    return 1;
  }
  return 0;
}

static int add_dots(scan *into, int64_t *row) {
  int64_t first = row[ROW_INSTRUCTIONS_END] - row[ROW_COUNT];
  if (into->dots.count && !build_table(into, row)) return 0;
  for (int64_t i = 0; i < into->dots.count; i++) {
    int64_t number = into->dots.items[i], operand = -1, macs = 0, slot;
    line dot, left;
    if (!read_line(into->data, place_of(into, first + number), &dot)) return 0;
    if (dot.operands) operand = find(into, row, dot.operand, &slot);
    if (operand >= 0 && read_line(into->data, place_of(into, operand), &left) &&
        dot_macs(into->data, &dot, &left, &macs) &&
        !__builtin_add_overflow(row[ROW_DOT_MACS], macs, &macs))
      row[ROW_DOT_MACS] = macs;
    else if (!push(&into->special, number))
      return 0;
  }
  return 1;
}

static int add_computation(scan *into, span where) {
  cursor at = {into->data, where.start, where.end};
  int64_t row[ROW] = {0};
  int64_t before = into->special.count + into->calls.count + into->applied.count;
  field in = {0};
  into->dots.count = 0;
  while (at.at < at.end) {
    if (!next_field(&at, &in)) return 0;
    if (in.wire == 2 && in.number == INSTRUCTION) {
      if (!add_instruction(into, in.span, row)) return 0;
    } else if (in.wire == 2 && in.number == NAME) {
      row[ROW_NAME] = in.span.start;
      row[ROW_NAME_END] = in.span.end;
    } else if (in.wire == 0 && in.number == COMPUTATION_ID) {
      row[ROW_ID] = as_signed(in.value);
    } else if (in.wire == 0 && in.number == ROOT_ID) {
      row[ROW_ROOT] = as_signed(in.value);
    }
  }
  row[ROW_INSTRUCTIONS_END] = into->ids.count;
  if (!add_dots(into, row)) return 0;
  row[ROW_SPECIAL_END] = into->special.count;
  row[ROW_CALLS_END] = into->calls.count;
  row[ROW_APPLIED_END] = into->applied.count;
  int64_t after = into->special.count + into->calls.count + into->applied.count;
  row[ROW_WORK] = after > before || row[ROW_DOT_MACS];
  for (int i = 0; i < ROW; i++)
    if (!push(&into->rows, row[i])) return 0;
  return 1;
}

static int add_module(scan *into, span where) {
  cursor at = {into->data, where.start, where.end};
  field in = {0};
  while (at.at < at.end) {
    if (!next_field(&at, &in)) return 0;
    if (in.wire == 0 && in.number == MODULE_ENTRY_ID) into->entry_id = as_signed(in.value);
    if (in.wire != 2) continue;
    if (in.number == MODULE_COMPUTATION) {
      if (!add_computation(into, in.span)) return 0;
    } else if (in.number == MODULE_NAME) {
      into->name = in.span.start;
      into->name_end = in.span.end;
    } else if (in.number == MODULE_ENTRY_NAME) {
      into->entry_name = in.span.start;
      into->entry_name_end = in.span.end;
    } else if (in.number == MODULE_PAYLOAD) {
      if (!push(&into->payloads, in.span.start) || !push(&into->payloads, in.span.end)) return 0;
    }
  }
  return into->rows.count > 0;
}

/* The module itself: the whole, or the first field of an HloProto; see reading.py. */
static int find_module(const uint8_t *data, int64_t size, span *found) {
  cursor at = {data, 0, size};
  span inner = {0, 0};
  field in = {0};
  while (at.at < at.end) {
    if (!next_field(&at, &in)) return 0;
    if (in.wire == 2 && in.number == MODULE_NAME) inner = in.span;
  }
  *found = (span){0, size};
  if (inner.end > inner.start && data[inner.start] < 0x20) *found = inner;
  return 1;
}

void hlo_free(scan *done) {
  if (!done) return;
  list *lists[] = {&done->rows,     &done->special, &done->calls, &done->applied, &done->places,
                   &done->payloads, &done->ids,     &done->dots,  &done->tables};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) free(lists[i]->items);
  free(done);
}

scan *hlo_scan(const uint8_t *data, int64_t size) {
  scan *made = calloc(1, sizeof *made);
  span module;
  if (!made) return NULL;
  made->data = data;
  if (find_module(data, size, &module) && add_module(made, module)) {
    made->data = NULL;
    return made;
  }
  hlo_free(made);
  return NULL;
}

/* Where a computation has the instruction of this id: 1, 0 if nowhere, -1 if there is no telling. */
int hlo_place(scan *in, int64_t computation, int64_t id, int64_t place[2]) {
  int64_t *row = in->rows.items + computation * ROW, slot;
  if (!build_table(in, row)) return -1;
  int64_t index = find(in, row, id, &slot);
  if (index < 0) return slot < 0 ? -1 : 0;
  memcpy(place, in->places.items + 2 * index, 2 * sizeof *place);
  return 1;
}
