#include "control.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "faults.h"
#include "fields.h"

enum { DIRECTORY = 2, STATS, CONTROL, END };  // inode numbers; those of real files are addresses
enum { MOST_FIELDS = 32 };

bool is_control(fuse_ino_t ino) {
  return ino >= DIRECTORY && ino < END;
}

fuse_ino_t control_find(fuse_ino_t parent, const char* name) {
  if (parent == FUSE_ROOT_ID && strcmp(name, ".kvtier") == 0) return DIRECTORY;
  if (parent == DIRECTORY && strcmp(name, "stats") == 0) return STATS;
  if (parent == DIRECTORY && strcmp(name, "control") == 0) return CONTROL;
  return 0;
}

void control_attributes(fuse_ino_t ino, struct stat* attributes) {
  static const mode_t modes[END] = {
      [DIRECTORY] = S_IFDIR | 0500, [STATS] = S_IFREG | 0400, [CONTROL] = S_IFREG | 0200};
  *attributes = (struct stat){.st_ino = ino,
                              .st_mode = modes[ino],
                              .st_nlink = 1,
                              .st_uid = geteuid(),
                              .st_gid = getegid()};
}

char* control_stats(void) {
  char* text = NULL;
  size_t size = 0;
  FILE* json = open_memstream(&text, &size);
  if (!json) return NULL;
  const struct counters* c = &device.counters;
  fprintf(json, "{\"name\": \"%s\", \"capacity\": %lld, \"used\": %lld,\n", device.name,
          (long long)device.capacity, (long long)space_used());
  fprintf(json,
          " \"reads\": %lld, \"read_bytes\": %lld, \"writes\": %lld, \"written_bytes\": %lld,",
          c->reads, c->read_bytes, c->writes, c->written_bytes);
  fprintf(json, " \"syncs\": %lld,\n \"outstanding\": %lld, \"max_outstanding\": %lld,", c->syncs,
          c->outstanding, c->most_outstanding);
  fprintf(json, " \"max_in_flight\": %lld, \"hanging\": %lld, \"faults_injected\": %lld,\n",
          c->most_in_flight, c->hanging, c->faults);
  fprintf(json, " \"faults\": [");
  faults_report(json);
  fprintf(json, "]}\n");
  fclose(json);
  return text;
}

static void reset_counts(void) {
  struct counters* c = &device.counters;
  c->reads = c->read_bytes = c->writes = c->written_bytes = c->syncs = c->faults = 0;
  c->most_in_flight = 0;
  c->most_outstanding = (long long)c->outstanding;
  faults_reset_counts();
}

int control_obey(const char* bytes, size_t length) {
  char* text = strndup(bytes, length);
  if (!text) return ENOMEM;
  char* fields[MOST_FIELDS + 1] = {NULL};
  char* rest = text;
  const char* verb = strsep(&rest, "\n");
  for (size_t n = 0; rest && n < MOST_FIELDS; n++) fields[n] = strsep(&rest, "\n");
  int error = 0;
  if (strcmp(verb, "inject") == 0)
    error = faults_add(fields);
  else if (strcmp(verb, "remove") == 0)
    faults_remove(field_number(fields, "id", 0));
  else if (strcmp(verb, "release") == 0)
    faults_release();
  else if (strcmp(verb, "reset") == 0)
    reset_counts();
  else
    error = EINVAL;
  free(text);
  return error;
}
