// Every other kind of nodes.
#include "strip_nodes.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

LATTICE_NODES(, Sparse);
LATTICE_NODES(, HardFloat);
LATTICE_NODES(, HardDouble);
LATTICE_NODES(, Precise);
LATTICE_DOTS(, Sparse);
LATTICE_DOTS(, Precise);

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
