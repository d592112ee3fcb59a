"""Plans and checked repositories, shown to people and as JSON: for the verbs plan, build, check and variants."""
