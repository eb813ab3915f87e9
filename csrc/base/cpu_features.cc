#include "base/cpu_features.h"
