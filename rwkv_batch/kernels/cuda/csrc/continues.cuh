// Rows that continue the row before them: they begin with the state after it.
#pragma once

constexpr int CONTINUES = -1;  // their read slot
