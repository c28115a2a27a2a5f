"""What techniques did to parameters, and what all of them share."""
