#include "kernels.h"
#include "logs.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template struct ChainSweeps<float, omega::Negentropy<float>>;
template struct ChainLogs<float, omega::Negentropy<float>>;
template struct ChainSweeps<float, omega::SquaredL2<float>>;
template struct ChainLogs<float, omega::SquaredL2<float>>;
template struct ChainSweeps<float, omega::Hard<float>>;
template struct ChainLogs<float, omega::Hard<float>>;

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
