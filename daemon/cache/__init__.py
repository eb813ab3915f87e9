"""The packed cache: models as they lie in their arenas, in files, so that a second load need not convert."""
