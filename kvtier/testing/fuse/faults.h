// Rules that make chosen requests fail, lie, or wait.
#pragma once

#include <stdio.h>

#include "inodes.h"

struct request {
  enum op op;
  struct inode* inode;
  off_t offset;  // of read, write, fallocate
  off_t length;
  bool direct;  // of open: with O_DIRECT
};

// What a rule does to a request.
struct effect {
  int error;         // errno to answer with; 0: none
  bool hang;         // wait for faults_release
  int64_t delay_ns;  // wait this much longer; of a hang: at most this long, 0 for no limit
  off_t keep;        // bytes that are moved; -1: all
  bool torn;         // a write that keeps less says nothing about it
  off_t flip_at;     // byte of the file whose bit is flipped; -1: none
  int flip_bit;      // 0 to 7
};

// The first rule that fires on the request decides.
struct effect faults_meet(const struct request* request);
// Wait out the effect's delay or hang; returns its errno.
int faults_suffer(const struct effect* effect);
// Flip the effect's bit if it lies in these bytes of the file.
void faults_flip(const struct effect* effect, unsigned char* bytes, off_t offset, off_t length);

// 0 or an errno.
int faults_add(char* const* fields);
// Remove rule `id` (every rule: 0), and let go what hangs.
void faults_remove(int64_t id);
// Let go of everything that hangs; the rules stay.
void faults_release(void);
void faults_reset_counts(void);
void faults_report(FILE* json);
