"""The features of the table; each module is one of its headings."""
