// Products: the nodes of negentropy in float.
#include "strip_nodes.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

LATTICE_NODES(, Products);
LATTICE_DOTS(, Products);

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
