#include "faults.h"

#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fields.h"
#include "timing.h"

struct rule {
  int64_t id;
  bool ops[OP_KINDS];
  char file[NAME_MAX + 1];  // a glob on the path or on its last part
  off_t begin, end;
  long long nth, limit, matched, hits;
  double probability;
  uint64_t seed;
  bool direct;       // only opens with O_DIRECT
  off_t sector;      // only what is not whole sectors of this size; 0: all
  int64_t capacity;  // the rule fires only on what would take the device beyond; -1: on all
  off_t flip;        // bit to flip, counted from where request and rule begin to overlap; -1: none
  struct effect effect;
  struct rule* next;
};

static const char* const op_names[OP_KINDS] = {"read",      "write",     "fsync",   "open",
                                               "fallocate", "ftruncate", "metadata"};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released;
static struct rule* rules;
static atomic_bool any_rules;
static uint64_t releases;

static bool has_range(enum op op) {
  return op == OP_READ || op == OP_WRITE || op == OP_FALLOCATE;
}

static bool matches(const struct rule* rule, const struct request* request, const char* path) {
  if (!rule->ops[request->op] || (rule->direct && !request->direct)) return false;
  const char* slash = strrchr(path, '/');
  if (fnmatch(rule->file, path, 0) && fnmatch(rule->file, slash ? slash + 1 : path, 0))
    return false;
  if (!has_range(request->op)) return true;
  if (rule->sector && (request->offset | request->length) % rule->sector == 0) return false;
  return request->offset < rule->end && rule->begin < request->offset + request->length;
}

static bool is_beyond(const struct rule* rule, const struct request* request) {
  int64_t reserved;
  if (rule->capacity < 0) return true;
  if (!space_reserve(request->inode, request->offset, request->length, rule->capacity, &reserved))
    return true;
  space_settle(request->inode, 0, 0, reserved);
  return false;
}

static bool fires(struct rule* rule, const struct request* request) {
  if (!is_beyond(rule, request)) return false;
  const long long n = ++rule->matched;
  if (n < rule->nth || rule->hits >= rule->limit) return false;
  return rule->probability >= 1 || random_fraction(rule->seed, n) < rule->probability;
}

struct effect faults_meet(const struct request* request) {
  struct effect effect = {.keep = -1, .flip_at = -1};
  if (!any_rules) return effect;
  char path[PATH_MAX];
  inode_path(request->inode, path, sizeof path);
  pthread_mutex_lock(&lock);
  for (struct rule* rule = rules; rule; rule = rule->next) {
    if (!matches(rule, request, path) || !fires(rule, request)) continue;
    rule->hits++;
    device.counters.faults++;
    effect = rule->effect;
    if (rule->flip >= 0) {
      const off_t overlap = request->offset > rule->begin ? request->offset : rule->begin;
      effect.flip_at = overlap + rule->flip / 8;
      effect.flip_bit = rule->flip % 8;
    }
    break;
  }
  pthread_mutex_unlock(&lock);
  return effect;
}

static void hang(int64_t longest_ns) {
  const int64_t until = now_ns() + longest_ns;
  const struct timespec end = {until / 1000000000, until % 1000000000};
  pthread_mutex_lock(&lock);
  device.counters.hanging++;
  const uint64_t before = releases;
  while (releases == before) {
    if (!longest_ns)
      pthread_cond_wait(&released, &lock);
    else if (pthread_cond_timedwait(&released, &lock, &end) == ETIMEDOUT)
      break;
  }
  device.counters.hanging--;
  pthread_mutex_unlock(&lock);
}

int faults_suffer(const struct effect* effect) {
  if (effect->hang)
    hang(effect->delay_ns);
  else if (effect->delay_ns)
    sleep_until_ns(now_ns() + effect->delay_ns);
  return effect->error;
}

void faults_flip(const struct effect* effect, unsigned char* bytes, off_t offset, off_t length) {
  if (effect->flip_at >= offset && effect->flip_at < offset + length)
    bytes[effect->flip_at - offset] ^= 1 << effect->flip_bit;
}

static bool set_ops(struct rule* rule, const char* name) {
  bool known = false;
  for (int op = 0; op < OP_KINDS; op++) {
    rule->ops[op] = strcmp(name, "any") == 0 || strcmp(name, op_names[op]) == 0;
    known |= rule->ops[op];
  }
  return known;
}

static void wait_on_monotonic_clock(void) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&released, &attributes);
}

int faults_add(char* const* fields) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, wait_on_monotonic_clock);
  struct rule* rule = calloc(1, sizeof *rule);
  if (!rule) return ENOMEM;
  const char* file = field(fields, "file", "*");
  if (strlen(file) >= sizeof rule->file || !set_ops(rule, field(fields, "op", "any"))) {
    free(rule);
    return EINVAL;
  }
  strcpy(rule->file, file);
  rule->id = field_number(fields, "id", 0);
  rule->begin = field_number(fields, "offset", 0);
  rule->end = rule->begin + field_number(fields, "length", INT64_MAX - rule->begin);
  rule->nth = field_number(fields, "nth", 1);
  rule->limit = field_number(fields, "count", INT64_MAX);
  rule->probability = field_fraction(fields, "probability", 1);
  rule->seed = field_number(fields, "seed", 0);
  rule->direct = field_number(fields, "direct", 0);
  rule->sector = field_number(fields, "sector", 0);
  rule->capacity = field_number(fields, "capacity", -1);
  rule->flip = field_number(fields, "flip_bit", -1);
  rule->effect = (struct effect){.error = field_number(fields, "errno", 0),
                                 .hang = field_number(fields, "hang", 0),
                                 .delay_ns = field_number(fields, "delay_ns", 0),
                                 .keep = field_number(fields, "keep", -1),
                                 .torn = field_number(fields, "torn", 0),
                                 .flip_at = -1};
  pthread_mutex_lock(&lock);
  struct rule** last = &rules;
  while (*last) last = &(*last)->next;
  *last = rule;
  any_rules = true;
  pthread_mutex_unlock(&lock);
  return 0;
}

void faults_remove(int64_t id) {
  pthread_mutex_lock(&lock);
  for (struct rule** at = &rules; *at;) {
    struct rule* rule = *at;
    if (id && rule->id != id) {
      at = &rule->next;
      continue;
    }
    *at = rule->next;
    free(rule);
  }
  any_rules = rules != NULL;
  pthread_mutex_unlock(&lock);
  faults_release();
}

void faults_release(void) {
  pthread_mutex_lock(&lock);
  releases++;
  pthread_cond_broadcast(&released);
  pthread_mutex_unlock(&lock);
}

void faults_reset_counts(void) {
  pthread_mutex_lock(&lock);
  for (struct rule* rule = rules; rule; rule = rule->next) rule->matched = rule->hits = 0;
  pthread_mutex_unlock(&lock);
}

void faults_report(FILE* json) {
  pthread_mutex_lock(&lock);
  for (const struct rule* rule = rules; rule; rule = rule->next)
    fprintf(json, "%s{\"id\": %lld, \"matched\": %lld, \"hits\": %lld}", rule == rules ? "" : ", ",
            (long long)rule->id, rule->matched, rule->hits);
  pthread_mutex_unlock(&lock);
}
