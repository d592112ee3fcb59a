"""Plans, checked repositories and the catalogue, for people and as JSON: what plan, build, check and variants print."""
