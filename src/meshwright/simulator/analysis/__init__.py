"""What a simulated step comes to: exposed communication, overlap, stragglers, advice."""
