// Products: the nodes of negentropy in float.
#include "run.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace table_engine {

LATTICE_NODES(, Products);
LATTICE_DOTS(, Products);

}  // namespace table_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
