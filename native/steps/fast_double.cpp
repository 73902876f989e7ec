#include "kernels.h"
#include "logs.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template struct ChainSweeps<double, omega::Negentropy<double>>;
template struct ChainLogs<double, omega::Negentropy<double>>;
template struct ChainSweeps<double, omega::SquaredL2<double>>;
template struct ChainLogs<double, omega::SquaredL2<double>>;
template struct ChainSweeps<double, omega::Hard<double>>;
template struct ChainLogs<double, omega::Hard<double>>;

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
