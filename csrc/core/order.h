// The canonical order of every sum: which elements are added together, the same on every backend.
//
// docs/record-format.md states it in words. A tile is 64 rows of 64 lanes; each lane adds four runs
// of 16 rows, top to bottom, and folds them (r0 + r1) + (r2 + r3). Lanes, then tiles, fold in the
// binary tree of adjacent pairs. Short runs let a GPU spread a tile over thread groups and let a
// CPU keep it in registers; adjacent pairs fold inside a thread before any shuffle.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace fastcheck {

constexpr int kLanes = 64;
constexpr int kRows = 64;
constexpr int kRuns = 4;
constexpr int kRunRows = kRows / kRuns;
constexpr int kTile = kRows * kLanes;

// Squares of float32 leave its range long before the values do, so a tile of very large or very
// small values is added up scaled by a power of two, undone in float64 where it is exact again.
// At 2^60 the 64 squares of a lane still fit (2^126); at 2^-40 a square is still normal.
constexpr float kScaleDownAbove = 0x1p60f;
constexpr float kScaleUpBelow = 0x1p-40f;

struct TileScale {
  float factor;        // applied to each element, in float32
  double undo;         // applied to the lanes of sum and abs_sum, in float64
  double undo_square;  // applied to the lanes of sum_sq
};

// `largest` is the largest finite magnitude of the tile; zero when there is none.
FASTCHECK_FN TileScale tile_scale(float largest) {
  if (largest > kScaleDownAbove) return {0x1p-96f, 0x1p96, 0x1p192};
  if (largest > 0.0f && largest < kScaleUpBelow) return {0x1p96f, 0x1p-96, 0x1p-192};
  return {1.0f, 1.0, 1.0};
}

}  // namespace fastcheck
