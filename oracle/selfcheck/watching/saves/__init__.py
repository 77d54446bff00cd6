"""What the program itself saves, held against what it trains with."""
