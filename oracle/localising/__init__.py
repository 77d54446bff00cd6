"""From a comparison that departs to the module and operation that is wrong by itself: the candidate runs again, fed the reference's values."""
