"""What modules choose and drop."""
