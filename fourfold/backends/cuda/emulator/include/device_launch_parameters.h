// device.h has threadIdx and its like.
#pragma once
