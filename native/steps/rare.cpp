#include "kernels.h"
#include "logs.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template struct ChainSweeps<float, omega::Root<float>>;
template struct ChainLogs<float, omega::Root<float>>;
template struct ChainSweeps<float, omega::AnyTsallis<float>>;
template struct ChainLogs<float, omega::AnyTsallis<float>>;
template struct ChainSweeps<double, omega::Root<double>>;
template struct ChainLogs<double, omega::Root<double>>;
template struct ChainSweeps<double, omega::AnyTsallis<double>>;
template struct ChainLogs<double, omega::AnyTsallis<double>>;

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
