"""What people see: lines, tables, bars and pages."""
