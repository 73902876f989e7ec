#include "kernels.h"

template bellmax::ChainKernels<double> bellmax::BELLMAX_ARCH::chain_kernels<double>();
