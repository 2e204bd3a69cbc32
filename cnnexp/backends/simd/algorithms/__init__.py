"""The algorithms: a file for each name that `backend.explain=true` prints, and what several of them share."""
