"""Tables of a simulated step: exposed communication, overlap, stragglers, memory."""
