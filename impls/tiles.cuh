// The order of the tiles of a product.
#pragma once

// The row and column of a tile. The order walks `group` rows of tiles by columns, so that inputs stay in the cache.
struct TileAt { int row, column; };
__device__ inline TileAt tile_at(int tile, int tiles_m, int tiles_n, int group) {
    const int first = tile / (group * tiles_n) * group, in_group = tile % (group * tiles_n);
    const int rows = tiles_m - first < group ? tiles_m - first : group;
    return {first + in_group % rows, in_group / rows};
}
