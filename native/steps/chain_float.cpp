#include "kernels.h"

template bellmax::ChainKernels<float> bellmax::BELLMAX_ARCH::chain_kernels<float>();
