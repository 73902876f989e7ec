// Every other kind of nodes.
#include "run.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace table_engine {

LATTICE_NODES(, Sparse);
LATTICE_NODES(, Maximal);
LATTICE_NODES(, Precise);
LATTICE_DOTS(, Sparse);
LATTICE_DOTS(, Precise);

}  // namespace table_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
