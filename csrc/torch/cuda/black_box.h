// The black box of each device: the first non-finite records of the last stretches of launches, in
// memory of the host, for the case that the device is lost before its records were copied.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

#include "cuda/launch.h"

namespace fastcheck::cuda {

// Begins a stretch of launches on a device, and returns its number, from 1 on. The first call of a
// device allocates its box, which may wait for the device. 0: it has none.
std::uint64_t begin_stretch(c10::DeviceIndex device);

// The box that launches on the device are given; without a box before the first begin_stretch().
BoxArgument box_of(c10::DeviceIndex device);

// The bytes of the box, whatever the state of the device; empty where there is none.
std::string box_contents(c10::DeviceIndex device);

}  // namespace fastcheck::cuda
