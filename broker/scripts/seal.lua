-- seal: {} -> {seal, the secret part of sealed names}: for those that read such keys beside the functions, and may
return { 'seal', SEAL }
